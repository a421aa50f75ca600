"""Reads a model -> ModelFiles: a folder with config.json, generation_config.json and safetensors files, or a GGUF file.

Reads headers, no weights. Runs no code from the folder.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from . import jsontext
from .errors import ModelRefused
from .families import FAMILIES
from .fields import Fields
from .ggufmodel import model_file, read_gguf
from .ggufshards import stem_of
from .ggufvalues import Value
from .modelconfig import MAX_VOCAB, ModelConfig, parse_config
from .multimodal import text_tensors
from .tensorfiles import StoredTensor, read_header, refusing_unreadable, regular_size

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODULES = "modules.json"  # of sentence-transformers; embedding models have it
MAX_JSON = 32 * 1024 * 1024  # bytes
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
Tensor = TypeVar("Tensor")
_SHARD_NAME = re.compile(r"[^/\\\0]{1,243}\.safetensors")  # at most 255 characters, as file systems allow
_MODEL = "model."  # prefix of all tensor names of a causal language model, except those of the output head
_HEAD = "lm_head."
USE_SAFETENSORS = "use a model with safetensors weights"

_LAYER = re.compile(r"model\.layers\.(\d+)\.")

_SAMPLING_RANGES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "temperature": (0.0, 100.0),
        "top_k": (0.0, 2**31 - 1),
        "top_p": (0.0, 1.0),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (1e-6, 100.0),
    }
)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The validated metadata of a model. No weights are read."""

    path: Path  # the folder; for GGUF: the file, or the first shard
    name: str
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]  # tensor name -> tensor, in all shards; of a multimodal model: the text model's
    eos_ids: tuple[int, ...]  # from generation_config.json, otherwise from config.json
    generation: Mapping[str, float]  # sampling parameters recommended by the authors, with the names of Sampling
    gguf: tuple[Path, ...] = ()  # the GGUF file, or its shards in their order; empty for safetensors
    suppressed: tuple[int, ...] = ()  # tokens that an answer must not have, from the metadata of a GGUF file
    metadata: Mapping[str, Value] = field(default_factory=dict)  # of the GGUF file; empty for safetensors
    headless: bool = False  # an embedding model without the weights of an output head: its logits mean nothing

    @property
    def used_tensors(self) -> dict[str, StoredTensor]:
        """The tensors without those of layers after the last one, which predict several tokens at a time: no backend
        loads them."""
        return {name: tensor for name, tensor in self.tensors.items() if not self._is_extra(name)}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all used tensors as stored."""
        return sum(tensor.num_bytes for tensor in self.used_tensors.values())

    def _is_extra(self, name: str) -> bool:
        layer = _LAYER.match(name)
        return layer is not None and 0 < self.config.num_layers <= int(layer[1])


def read_model(path: Path | str, name: str | None = None) -> ModelFiles:
    """Read a model folder or a GGUF file. Raises ModelRefused with the file and the field.

    `path`: a folder; a GGUF file; or the first shard of a GGUF model. A folder without safetensors may have the GGUF
    files of one model. `name` defaults to the name of the folder or file.
    """
    folder = Path(path)
    gguf = _gguf_of(folder)
    if gguf is not None:
        return _read_gguf(gguf, name)
    _check_folder(folder)
    config = parse_config(read_json(folder / "config.json"))
    tensors = read_tensors(folder)
    if config.multimodal:
        tensors = text_tensors(tensors)
        # transformers: the default of tie_word_embeddings is true, but a head in the files is used.
        config = replace(config, tie_embeddings=config.tie_embeddings and not _has_head(tensors))
    headless = _is_headless(folder, config, tensors)
    if headless:
        config = replace(config, tie_embeddings=True)
    generation = _read_generation(folder / "generation_config.json")
    eos_ids = generation.ids("eos_token_id", config.vocab_size or MAX_VOCAB)
    return ModelFiles(
        path=folder,
        name=name or folder.resolve().name,
        config=config,
        tensors=MappingProxyType(tensors),
        eos_ids=eos_ids or config.eos_ids,
        generation=MappingProxyType(_recommended(generation)),
        headless=headless,
    )


def read_architecture(folder: Path) -> ModelFiles:
    """The metadata of a model without its tensors. Reads only config.json, or GGUF headers. Raises ModelRefused."""
    gguf = _gguf_of(folder)
    if gguf is not None:
        return replace(_read_gguf(gguf), tensors=MappingProxyType({}))
    config = parse_config(read_json(folder / "config.json"))
    return ModelFiles(folder, folder.name, config, MappingProxyType({}), config.eos_ids, MappingProxyType({}))


def _gguf_of(path: Path) -> Path | None:
    """The GGUF file at `path`; None for a folder with safetensors files, and for a folder without any model."""
    if path.is_dir() and any(path.glob("*.safetensors")):
        return None
    return model_file(path)


def _read_gguf(file: Path, name: str | None = None) -> ModelFiles:
    model = read_gguf(file)
    return ModelFiles(
        path=file,
        name=name or stem_of(file.name),
        config=model.config,
        tensors=model.tensors,
        eos_ids=model.config.eos_ids,
        generation=model.sampling,
        gguf=model.shards,
        suppressed=model.suppressed,
        metadata=model.metadata,
    )


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelRefused(f"model folder {folder} does not exist")
    if (folder / "config.json").exists():
        return
    raise ModelRefused(f"{folder.name} has no config.json", "use a model folder as on Hugging Face")


def _read_generation(file: Path) -> Fields:
    if not file.exists():
        return Fields({}, file.name)
    return Fields(read_json(file), file.name)


def _recommended(fields: Fields) -> dict[str, float]:
    """Recommended sampling parameters; `do_sample: false` means greedy."""
    if not fields.flag("do_sample", True):
        return {"temperature": 0.0}
    return {key: fields.number(key, *limits) for key, limits in _SAMPLING_RANGES.items() if key in fields}


def read_json(file: Path) -> Mapping[str, Any]:
    """The JSON object in a file of at most MAX_JSON bytes. Raises ModelRefused with the file and the reason."""
    values = _read_value(file)
    if not isinstance(values, dict):
        raise ModelRefused(f"{file.name} must contain a JSON object, not a {type(values).__name__}")
    return values


def read_json_list(file: Path) -> list[Any]:
    """The JSON list in a file. Raises ModelRefused as read_json does."""
    values = _read_value(file)
    if not isinstance(values, list):
        raise ModelRefused(f"{file.name} must contain a JSON list, not a {type(values).__name__}")
    return values


def _read_value(file: Path) -> Any:
    size = regular_size(file)
    if size > MAX_JSON:
        raise ModelRefused(f"{file.name} has {size} bytes; the limit is {MAX_JSON}")
    with refusing_unreadable(file):
        content = file.read_bytes()
    try:
        return jsontext.parse(content)
    except ValueError as error:
        raise ModelRefused(f"{file.name} is {error}") from error


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor in the safetensors files of a model folder, with names_of_language_model. Raises ModelRefused."""
    return names_of_language_model(_read_tensors(folder))


def names_of_language_model(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with the names that a causal language model has. A model that was saved without its output head,
    such as an embedding model, has names without the prefix `model.` in its files."""
    has_prefix = "embed_tokens.weight" not in tensors or any(name.startswith(_MODEL) for name in tensors)
    if has_prefix:
        return tensors
    return {name if name.startswith(_HEAD) else f"{_MODEL}{name}": tensor for name, tensor in tensors.items()}


def _is_headless(folder: Path, config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> bool:
    """True for an embedding model that has an output head of its own in config.json, but not in its weights."""
    has_head = config.tie_embeddings or _has_head(tensors)
    return not has_head and config.model_type in FAMILIES and (folder / MODULES).exists()


def _has_head(tensors: Mapping[str, StoredTensor]) -> bool:
    return any(name.startswith(_HEAD) for name in tensors)


def _read_tensors(folder: Path) -> dict[str, StoredTensor]:
    if (folder / SINGLE).exists():
        return dict(read_header(folder / SINGLE))
    if not (folder / INDEX).exists():
        raise _no_weights(folder)
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelRefused(f"{INDEX}: weight_map must be an object of tensor names and files")
    tensors = _read_shards({_shard(folder, file) for file in weight_map.values()})
    _check_index(weight_map, {name: tensor.file.name for name, tensor in tensors.items()})
    return tensors


def _check_index(listed: Mapping[str, str], stored: Mapping[str, str]) -> None:
    """Both arguments: tensor name -> file name. Raises ModelRefused for the first difference."""
    wrong = sorted(listed.items() - stored.items())
    if wrong:
        name, file = wrong[0]
        raise ModelRefused(f"tensor {name!r:.200} is not in {file}, contrary to {INDEX}")
    unlisted = sorted(stored.items() - listed.items())
    if unlisted:
        name, file = unlisted[0]
        raise ModelRefused(f"tensor {name!r:.200} is in {file}, but not in {INDEX}")


def _read_shards(files: Collection[Path]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(files):
        with refusing_unreadable(file):
            is_present = file.exists()
        if not is_present:
            raise ModelRefused(f"shard {file.name} is missing", "download the model again")
        header = read_header(file)
        for name, tensor in header.items():
            other = tensors.setdefault(name, tensor)
            if other is not tensor:
                raise ModelRefused(f"tensor {name!r} is in both {other.file.name} and {file.name}")
    return tensors


def _shard(folder: Path, file: object) -> Path:
    """The path of a shard. Raises ModelRefused for a name that leads out of the folder, which is an attack."""
    if not isinstance(file, str) or not _SHARD_NAME.fullmatch(file):
        raise ModelRefused(f"{INDEX} names {file!r:.200}, which is not a .safetensors file in the model folder")
    return folder / file


def _no_weights(folder: Path) -> ModelRefused:
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles:
        return ModelRefused(
            f"{folder.name} has only pickle weights ({pickles[0]}); loading them could run code", USE_SAFETENSORS
        )
    return ModelRefused(f"{folder.name} has no weights: {SINGLE} and {INDEX} are missing", "download the model again")
