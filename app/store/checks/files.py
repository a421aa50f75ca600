"""Checks a model or an adapter on disk by its configuration and the headers of its weights. Reads no weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ....engine.errors import ModelRefused
from ....engine.files.adapter_files import read_adapter_header
from ....engine.files.families import FAMILIES
from ....engine.files.gguf_model import parse_metadata
from ....engine.files.gguf_shards import missing_shards, parse_shard
from ....engine.files.model_config import ModelConfig
from ....engine.files.model_files import ModelFiles, read_model
from ...chat.tokenizer.classes import check_class
from ...paths import RENAME, problem_of_name
from ..local.ggufs import files_in
from ..local.refs import ModelRef
from .architectures import unsupported
from .headers import read_gguf_file
from .tokenizer import TOKENIZER


def check(ref: ModelRef, *, ask_backends: bool = True) -> list[str]:
    """The problems of a model or an adapter; empty if there is none.

    A problem is a sentence for the user. Truncated and damaged weights, missing shards, a missing tokenizer and an
    unsupported architecture are problems. Weights are not compared with their hashes. Without `ask_backends`, an
    architecture that only a backend can judge is no problem, and the check takes about a millisecond.
    tokenizer.py opens the tokenizer.
    """
    if problem := problem_of_name(ref.path):
        return [f"{problem}; {RENAME}"]
    if ref.kind == "adapter":
        return check_gguf(ref.weight_files) or _problem_of(read_adapter_header, ref.path)
    if ref.kind != "gguf":
        return _check_model(ref.path, ask_backends)
    if not ref.is_gguf:
        return check_gguf([file.path for file in files_in(ref.path)])
    files = ref.weight_files
    return check_gguf(files) or _problem_of(gguf_config, files[0]) or _unsupported(ref.path, ask_backends)


def _unsupported(path: Path, ask_backends: bool) -> list[str]:
    return list(filter(None, [unsupported(path)])) if ask_backends else []


def gguf_config(file: Path) -> ModelConfig:
    """The configuration in the metadata of a GGUF file, the first shard of a model. Raises ModelRefused."""
    return parse_metadata(read_gguf_file(file).metadata, file.name)


def check_gguf(files: Sequence[Path]) -> list[str]:
    """The problems of GGUF files in one folder: paths that are no text, missing shards, and damaged headers."""
    for problem in filter(None, map(problem_of_name, files)):
        return [f"{problem}; {RENAME}"]
    problems = _first_missing(files)
    for file in files:
        problems += _problem_of(read_gguf_file, file)
    return problems


def _first_missing(files: Sequence[Path]) -> list[str]:
    """The first missing shard of each GGUF model among files of one folder."""
    models: dict[tuple[str, int], list[str]] = {}
    for file in files:
        if shard := parse_shard(file.name):
            models.setdefault((shard.stem, shard.count), []).append(file.name)
    missing = map(missing_shards, models.values())
    return [f"shard {names[0]} is missing" for names in missing if names]


def missing_tensor(files: ModelFiles) -> str:
    """The first tensor that every model of this architecture needs and the files do not have; empty if there is none.

    Embedding models, for example, have the architecture of a language model, and other names of tensors.
    """
    if files.gguf or files.config.model_type not in FAMILIES:
        return ""
    layers = [f"model.layers.{index}.post_attention_layernorm.weight" for index in range(files.config.num_layers)]
    for name in ("model.embed_tokens.weight", *layers, "model.norm.weight"):
        if name not in files.tensors:
            return f"tensor {name} is missing: the weights are not those of a {files.config.model_type} language model"
    return ""


def _check_model(folder: Path, ask_backends: bool) -> list[str]:
    try:
        files = read_model(folder, folder.name)
        if not (folder / TOKENIZER).exists():
            return [f"{TOKENIZER} is missing"]
        check_class(folder)
        if missing := missing_tensor(files):
            return [missing]
        return _unsupported(folder, ask_backends)
    except ModelRefused as error:
        return [str(error)]


def _problem_of(read: Callable[[Path], object], path: Path) -> list[str]:
    try:
        read(path)
    except ModelRefused as error:
        return [str(error)]
    return []
