"""Reads a model folder: config.json, generation_config.json, safetensors headers -> ModelFiles. Runs no code of it."""

from __future__ import annotations

import json
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .errors import ModelRefused
from .fields import Fields
from .modelconfig import MAX_VOCAB, ModelConfig, parse_config
from .tensorfiles import StoredTensor, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_JSON = 32 * 1024 * 1024  # bytes

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

    path: Path
    name: str
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]  # name -> tensor, over all shards
    eos_ids: tuple[int, ...]  # from generation_config.json, otherwise from config.json
    generation: Mapping[str, float]  # sampling parameters recommended by the authors, with the names of Sampling

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def read_model(path: Path | str, name: str | None = None) -> ModelFiles:
    """Read a model folder. `name` defaults to the folder name. Raises ModelRefused with the file and the field."""
    folder = Path(path)
    if folder.suffix.lower() == ".gguf":
        raise ModelRefused(f"{folder.name}: GGUF files are not supported", "use a model with safetensors weights")
    if not folder.is_dir():
        raise ModelRefused(f"model folder {folder} does not exist")
    if not (folder / "config.json").exists():
        raise _no_config(folder)
    config = parse_config(_read_json(folder / "config.json"))
    generation: dict[str, float] = {}
    eos_ids = config.eos_ids
    if (folder / "generation_config.json").exists():
        fields = Fields(_read_json(folder / "generation_config.json"), "generation_config.json")
        eos_ids = fields.ids("eos_token_id", config.vocab_size or MAX_VOCAB) or eos_ids
        generation = _recommended(fields)
    tensors = MappingProxyType(_read_tensors(folder))
    return ModelFiles(folder, name or folder.resolve().name, config, tensors, eos_ids, MappingProxyType(generation))


def _no_config(folder: Path) -> ModelRefused:
    if any(folder.glob("*.gguf")):
        return ModelRefused(
            f"{folder.name} has GGUF files, which are not supported", "use a model with safetensors weights"
        )
    return ModelRefused(f"{folder.name} has no config.json", "use a model folder as on Hugging Face")


def _recommended(fields: Fields) -> dict[str, float]:
    """Recommended sampling parameters; `do_sample: false` means greedy."""
    if not fields.flag("do_sample", True):
        return {"temperature": 0.0}
    return {key: fields.number(key, *limits) for key, limits in _SAMPLING_RANGES.items() if key in fields}


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelRefused(f"{file.name} is not a regular file")
        if status.st_size > MAX_JSON:
            raise ModelRefused(f"{file.name} has {status.st_size} bytes; the limit is {MAX_JSON}")
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelRefused(f"{file.name} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{file.name} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelRefused(f"{file.name} must contain a JSON object, not a {type(values).__name__}")
    return values


def _read_tensors(folder: Path) -> dict[str, StoredTensor]:
    if (folder / SINGLE).exists():
        return dict(read_header(folder / SINGLE))
    if not (folder / INDEX).exists():
        raise _no_weights(folder)
    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelRefused(f"{INDEX}: weight_map must be an object of tensor names and files")
    tensors = _read_shards({_shard(folder, file) for file in weight_map.values()})
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ModelRefused(f"tensor {name!r:.200} is not in {file}, contrary to {INDEX}")
    for name in tensors.keys() - weight_map.keys():
        raise ModelRefused(f"tensor {name!r:.200} is in {tensors[name].file.name}, but not in {INDEX}")
    return tensors


def _read_shards(files: Collection[Path]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(files):
        if not file.exists():
            raise ModelRefused(f"shard {file.name} is missing", "download the model again")
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise ModelRefused(f"tensor {name!r} is in both {tensors[name].file.name} and {file.name}")
            tensors[name] = tensor
    return tensors


def _shard(folder: Path, file: object) -> Path:
    """The path of a shard. Refuses a name that leads out of the folder (an attack)."""
    if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file or "\\" in file:
        raise ModelRefused(f"{INDEX} names {file!r:.200}, which is not a .safetensors file in the model folder")
    return folder / file


def _no_weights(folder: Path) -> ModelRefused:
    unsafe = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
    if unsafe:
        return ModelRefused(
            f"{folder.name} has only pickle weights ({unsafe[0]}); loading them could run code",
            "use a model with safetensors weights",
        )
    if any(folder.glob("*.gguf")):
        return ModelRefused(
            f"{folder.name} has only GGUF weights, which are not supported",
            "use a model with safetensors weights",
        )
    return ModelRefused(f"{folder.name} has no weights: {SINGLE} and {INDEX} are missing", "download the model again")
