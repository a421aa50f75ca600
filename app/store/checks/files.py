"""Checks a model or an adapter on disk by its configuration and the headers of its weights. Reads no weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ....engine.errors import ModelRefused
from ....engine.files.adapter_config import CONFIG as ADAPTER_CONFIG
from ....engine.files.adapter_files import read_adapter_header
from ....engine.files.families import FAMILIES
from ....engine.files.gguf_model import parse_metadata
from ....engine.files.gguf_shards import missing_shards, parse_shard
from ....engine.files.model_config import ModelConfig
from ....engine.files.model_files import ModelFiles, read_model
from ...chat.tokenizer.classes import check_class
from ...paths import RENAME, problem_of_name
from ..local.ggufs import files_in, is_adapter, is_gguf, model_of
from .architectures import unsupported
from .headers import read_gguf_file
from .tokenizer import TOKENIZER


def check(path: Path, *, ask_backends: bool = True) -> list[str]:
    """The problems of a model, an adapter or a GGUF file; empty if there is none. `path`: a folder, or a GGUF file.

    A problem is a sentence for the user. Truncated and damaged weights, missing shards, a missing tokenizer and an
    unsupported architecture are problems. Weights are not compared with their hashes. Without `ask_backends`, an
    architecture of which only a backend knows is no problem, and the check takes about a millisecond.
    tokenizer_check.py opens the tokenizer.
    """
    if problem := problem_of_name(path):
        return [f"{problem}; {RENAME}"]
    if is_gguf(path):
        return _check_gguf_model(path, ask_backends)
    if (path / ADAPTER_CONFIG).exists() and not (path / "config.json").exists():
        return _problem_of(read_adapter_header, path)
    files = [file.path for file in files_in(path)]
    if files and not any(path.glob("*.safetensors")):
        return check_gguf(files)
    return _check_model(path, ask_backends)


def _check_gguf_model(path: Path, ask_backends: bool) -> list[str]:
    """`path`: a GGUF file that may not exist, or the first of several shards."""
    files = [file.path for file in model_of(path).files] if path.is_file() else [path]
    problems = check_gguf(files)
    if not problems and is_adapter(path):
        return _problem_of(read_adapter_header, path)
    if problems:
        return problems
    problems = _problem_of(gguf_config, files[0])
    if not problems and ask_backends:
        problems += filter(None, [unsupported(path)])
    return problems


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
        reason = unsupported(folder) if ask_backends else ""
    except ModelRefused as error:
        return [str(error)]
    return [reason] if reason else []


def _problem_of(read: Callable[[Path], object], path: Path) -> list[str]:
    try:
        read(path)
    except ModelRefused as error:
        return [str(error)]
    return []
