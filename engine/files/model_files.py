"""Reads a model -> ModelFiles: a folder with config.json, generation_config.json and safetensors files, or a GGUF file.

Reads headers, no weights. Runs no code from the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from ..errors import ModelRefused
from .config_files import read_config
from .families import FAMILIES
from .generation_config import read_generation
from .gguf_model import model_file, read_gguf
from .gguf_names import gguf_hint
from .gguf_shards import stem_of
from .gguf_values import Value
from .model_config import MAX_VOCAB, ModelConfig, parse_config
from .multimodal import other_parts, text_tensors
from .tensor_files import StoredTensor
from .tensor_names import decoder_tensors, names_of_language_model, unused_warnings
from .weight_files import INDEX, OTHER_FORMAT, PARAMS, SINGLE, read_weights

MODULES = "modules.json"  # of sentence-transformers; embedding models have it
_HEAD = "lm_head."


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The validated metadata of a model. No weights are read."""

    path: Path  # the folder; for GGUF: the file, or the first shard
    name: str
    config: ModelConfig
    # Tensor name -> tensor, in all shards. Of an architecture in FAMILIES: those that its decoder may read.
    tensors: Mapping[str, StoredTensor]
    eos_ids: tuple[int, ...]  # from generation_config.json, otherwise from config.json
    generation: Mapping[str, float]  # sampling parameters recommended by the authors, with the names of Sampling
    gguf: tuple[Path, ...] = ()  # the GGUF file, or its shards in their order; empty for safetensors
    suppressed: tuple[int, ...] = ()  # tokens that an answer must not have
    metadata: Mapping[str, Value] = field(default_factory=dict)  # of the GGUF file; empty for safetensors
    headless: bool = False  # an embedding model without the weights of an output head: its logits mean nothing
    warnings: tuple[str, ...] = ()  # values and tensors of the files that are not used, for the user

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


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
    name = name or folder.resolve().name
    config = _parsed_config(folder, name)
    warnings = [*config.warnings]
    tensors, absent = read_weights(folder, warnings)
    tensors, absent = names_of_language_model(tensors), names_of_language_model(absent)
    if config.multimodal:
        warnings += _warnings_of_parts(tensors, config)
        tensors, absent = text_tensors(tensors), text_tensors(absent)
        # transformers: the default of tie_word_embeddings may be true, but a head in the files is used.
        config = replace(config, tie_embeddings=config.tie_embeddings and not _has_head(tensors))
    _check_absent(absent, config)
    warnings += unused_warnings(tensors, config)
    tensors = decoder_tensors(tensors, config)
    headless = _is_headless(folder, config, tensors)
    if headless:
        config = replace(config, tie_embeddings=True)
    generation = read_generation(folder, config.vocab_size or MAX_VOCAB)
    return ModelFiles(
        path=folder,
        name=name,
        config=config,
        tensors=MappingProxyType(tensors),
        eos_ids=generation.eos_ids or config.eos_ids,
        generation=MappingProxyType(generation.sampling),
        suppressed=generation.suppressed,
        headless=headless,
        warnings=(*warnings, *generation.warnings),
    )


def _warnings_of_parts(tensors: Mapping[str, StoredTensor], config: ModelConfig) -> list[str]:
    """A warning about the parts of a multimodal model that are not loaded."""
    parts = other_parts(tensors)
    return [f"{', '.join(parts)} of {config.multimodal}: not loaded, the model reads text only"] if parts else []


def _check_absent(absent: Mapping[str, str], config: ModelConfig) -> None:
    """Refuse an index that lists a weight of the decoder that no file has. `absent`: tensor name -> file name."""
    for name, file in decoder_tensors(absent, config).items():
        is_optional = name.endswith(".bias") or (config.tie_embeddings and name.startswith(_HEAD))
        if not is_optional:
            problem = f"tensor {name!r:.200} is not in {file}, contrary to {INDEX}"
            raise ModelRefused(problem, "download the model again")


def read_architecture(folder: Path) -> ModelFiles:
    """The metadata of a model without its tensors. Reads only config.json, or GGUF headers. Raises ModelRefused."""
    gguf = _gguf_of(folder)
    if gguf is not None:
        return replace(_read_gguf(gguf), tensors=MappingProxyType({}))
    config = _parsed_config(folder, folder.name)
    return ModelFiles(folder, folder.name, config, MappingProxyType({}), config.eos_ids, MappingProxyType({}))


def _parsed_config(folder: Path, name: str) -> ModelConfig:
    values = read_config(folder)
    try:
        return parse_config(values)
    except ModelRefused as error:
        raise ModelRefused(str(error), error.hint or gguf_hint(name, str(values.get("model_type")))) from error


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
        warnings=model.warnings,
    )


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelRefused(f"model folder {folder} does not exist")
    if (folder / "config.json").exists():
        return
    if (folder / PARAMS).exists():
        raise ModelRefused(f"{folder.name} {OTHER_FORMAT}", f"use a model with config.json and {SINGLE}")
    raise ModelRefused(f"{folder.name} has no config.json", "use a model folder as on Hugging Face")


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor in the safetensors files of a model folder, with names_of_language_model. Raises ModelRefused."""
    tensors, _ = read_weights(folder, [])
    return names_of_language_model(tensors)


def _is_headless(folder: Path, config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> bool:
    """True for an embedding model that has an output head of its own in config.json, but not in its weights."""
    has_head = config.tie_embeddings or _has_head(tensors)
    return not has_head and config.model_type in FAMILIES and (folder / MODULES).exists()


def _has_head(tensors: Mapping[str, StoredTensor]) -> bool:
    return any(name.startswith(_HEAD) for name in tensors)
