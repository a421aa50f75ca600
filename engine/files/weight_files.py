"""The safetensors files of a model folder -> its tensors. Reads headers, no weights.

    model.safetensors                                      all tensors, or
    model.safetensors.index.json                           the names of the shards
    model-00001-of-00002.safetensors, …                    the shards

The files of msModelSlim have other names: see SINGLES.

As in transformers, an index only names the shards: a model has all their tensors, and of two tensors with one name that
of the last shard.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from ..errors import ModelRefused
from .json_files import read_json
from .tensor_files import StoredTensor, read_header, refusing_unreadable
from .tensor_names import listed

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MODELSLIM = ("weights", "weight_w8a8", "weight_w8a8_dynamic")
SINGLES = (SINGLE, *(f"quant_model_{end}.safetensors" for end in _MODELSLIM))
INDEXES = tuple(f"{name}.index.json" for name in SINGLES)  # of the shards of each
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
USE_SAFETENSORS = "use a model with safetensors weights"

_SHARD_NAME = re.compile(r"[^/\\\0]{1,243}\.safetensors")  # at most 255 characters, as file systems allow
PARAMS = "params.json"  # Mistral's own format, with other names of fields and tensors
OTHER_FORMAT = "is in Mistral's own format (params.json, consolidated.safetensors), which is not supported"
_MISTRAL = "consolidated*.safetensors"


def read_weights(folder: Path, warnings: list[str]) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """(every tensor in the weight files of a model folder, the tensors that an index lists and no file has, with the
    name of the file). Adds to `warnings` what the index and the shards contradict. Raises ModelRefused."""
    for single, index in zip(SINGLES, INDEXES, strict=True):
        if (folder / single).exists():
            return dict(read_header(folder / single)), {}
        if (folder / index).exists():
            return _read_indexed(folder, index, warnings)
    raise _no_weights(folder)


def _read_indexed(folder: Path, index: str, warnings: list[str]) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    weight_map = read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelRefused(f"{index}: weight_map must be an object of tensor names and files")
    tensors = _read_shards({_shard(folder, file) for file in weight_map.values()}, warnings)
    absent = {name: file for name, file in weight_map.items() if name not in tensors}
    unlisted = sorted(tensors.keys() - weight_map.keys())
    moved = sorted(name for name in tensors.keys() & weight_map if weight_map[name] != tensors[name].file.name)
    if absent:
        warnings.append(f"{index} lists {listed(sorted(absent))}, which no file has")
    if unlisted:
        warnings.append(f"{index} does not list {listed(unlisted)}")
    if moved:
        warnings.append(f"{index} names another file of {listed(moved)}")
    return tensors, absent


def _read_shards(files: Collection[Path], warnings: list[str]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(files):
        with refusing_unreadable(file):
            is_present = file.exists()
        if not is_present:
            raise ModelRefused(f"shard {file.name} is missing", "download the model again")
        header = read_header(file)
        if repeated := sorted(header.keys() & tensors.keys()):
            warnings.append(f"{listed(repeated)}: read from {file.name}, the last of the files that have it")
        tensors.update(header)
    return tensors


def _shard(folder: Path, file: object) -> Path:
    """The path of a shard. Raises ModelRefused for a name that leads out of the folder, which is an attack."""
    if not isinstance(file, str) or not _SHARD_NAME.fullmatch(file):
        raise ModelRefused(f"{INDEX} names {file!r:.200}, which is not a .safetensors file in the model folder")
    return folder / file


def _no_weights(folder: Path) -> ModelRefused:
    if any(folder.glob(_MISTRAL)):
        return ModelRefused(f"{folder.name} {OTHER_FORMAT}", f"use a model with {SINGLE}")
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles:
        return ModelRefused(
            f"{folder.name} has only pickle weights ({pickles[0]}); loading them could run code", USE_SAFETENSORS
        )
    return ModelRefused(f"{folder.name} has no weights: {SINGLE} and {INDEX} are missing", "download the model again")
