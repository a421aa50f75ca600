"""The files of a repository that a download needs: one weight format, and never pickle.

Every backend of safetensors reads the same files: `model.safetensors`, or an index and its shards. A GGUF model is one
file, or all its shards; a name selects it by its quantisation. A repository with only GGUF models has a default model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from operator import attrgetter
from typing import Generic, Literal, Protocol, TypeVar

from ...engine.files.gguf_shards import SUFFIX as GGUF
from ...engine.files.gguf_shards import missing_shards, parse_shard
from ...engine.files.weight_files import INDEX, INDEXES, OTHER_FORMAT, PARAMS, PICKLE_SUFFIXES, SINGLE, SINGLES
from ..errors import ModelNotFound, ModelUnusable
from .names import QUANT, HubName
from .records import Variant

ADAPTER_CONFIG = "adapter_config.json"
# Files in subfolders: chat templates, and the pooling of embedding models (engine/files/pooling.py).
SUBFOLDERS = ("additional_chat_templates/*.jinja", "*_Pooling/config.json")
# Files to download with the weights: those that a load reads, and the licence. A `*` matches within one folder.
SMALL = (
    "*.json",
    "*.jinja",
    *SUBFOLDERS,
    "tokenizer.model",
    "*.txt",
    "*.md",
    "LICENSE*",
    "NOTICE*",
)
ADAPTER = (ADAPTER_CONFIG, "adapter_model.safetensors", "adapters.safetensors", "*.md", "LICENSE*", "NOTICE*")
WITH_GGUF = ("*.md", "LICENSE*", "NOTICE*")
WEIGHTS = "*.safetensors"
SHARD = r"-\d+-of-\d+\.safetensors"  # the end of the name
GGUF_QUANT = re.compile(rf"(?:^|[-._])({QUANT})(?=[-.]|$)", re.IGNORECASE)
DEFAULT_QUANT = "Q4_K_M"
OTHER_REPO = "find a repo of the same model with .safetensors or .gguf files"
NO_CONFIG = "weights without config.json are no complete model"


class File(Protocol):
    """A file of a repository."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...


FileType = TypeVar("FileType", bound=File)


@dataclass(frozen=True, slots=True)
class Selection(Generic[FileType]):
    """The files to download, weights last."""

    kind: Literal["model", "adapter", "gguf"]
    files: list[FileType]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def select(name: HubName, files: Sequence[FileType]) -> Selection[FileType]:
    """The files that `name` selects. A name without a selector prefers safetensors weights to GGUF models.

    Raises ModelUnusable for a repository without weights that localllm reads, ModelNotFound if the name selects a
    quantisation or a file that the repository does not have.
    """
    files = sorted(files, key=attrgetter("name"))
    if selects_gguf(name) or _has_only_gguf(files):
        return Selection("gguf", _matching(files, *WITH_GGUF) + select_gguf(name, files))
    selection = _select_safetensors(name, files)
    if name.file and name.file not in {file.name for file in selection.files}:
        hint = f"to download the model: localllm pull {name}"
        raise ModelNotFound(f"{name.file} is not a weight file that localllm reads", hint=hint, param="model")
    return selection


def selects_gguf(name: HubName) -> bool:
    """True if the name alone selects a GGUF file."""
    return bool(name.quant) or name.file.lower().endswith(GGUF)


def _has_only_gguf(files: list[FileType]) -> bool:
    """True for a repository with GGUF models and without safetensors weights."""
    return not _matching(files, WEIGHTS) and any(is_gguf_model(file.name) for file in files)


def _select_safetensors(name: HubName, files: list[FileType]) -> Selection[FileType]:
    names = {file.name for file in files}
    weights = _matching(files, WEIGHTS)
    if not weights:
        raise _no_weights(name, names)
    if ADAPTER_CONFIG in names and not names & {"config.json", SINGLE, INDEX}:
        return Selection("adapter", _matching(files, *ADAPTER))
    if "config.json" not in names:
        raise _no_config(name, names)
    single, index = next((pair for pair in zip(SINGLES, INDEXES, strict=True) if names & {*pair}), ("", ""))
    if not single:
        problem = f"{name} has weights in {weights[0].name}, but no {SINGLE} or {INDEX}"
        raise ModelUnusable(problem, hint=OTHER_REPO)
    indexes = {single} if single in names else {index}
    small = [file for file in _matching(files, *SMALL) if not file.name.endswith(".index.json") or file.name in indexes]
    return Selection("model", small + _model_weights(weights, single))


def _no_config(name: HubName, names: set[str]) -> ModelUnusable:
    if PARAMS in names:
        return ModelUnusable(f"{name} {OTHER_FORMAT}", hint=OTHER_REPO)
    return ModelUnusable(f"{name} has no config.json: it is not a complete model", hint="pull its base model")


def _model_weights(weights: list[FileType], single: str) -> list[FileType]:
    """The weights that a load reads: the file `single`, or the shards that replace it. Some repositories also have
    copies in other formats or under other names."""
    stem = single.removesuffix(".safetensors")
    whole = [file for file in weights if file.name == single]
    shards = [file for file in weights if re.fullmatch(stem + SHARD, file.name)]
    models = [file for file in weights if file.name.startswith(stem)]
    return whole or shards or models or weights


def select_gguf(name: HubName, files: Sequence[FileType]) -> list[FileType]:
    """The GGUF files that `name` selects among `files`: one file, or all shards of one model in their order.

    A name without a quantisation and without a file selects the default model. Raises ModelNotFound, or ModelUnusable
    if a shard is missing or if the name selects several models.
    """
    chosen = _chosen(name, gguf_models(files))
    if not chosen:
        quants = ", ".join(gguf_quants(file.name for file in files)) or "none"
        selected = f" {name.file or name.quant}" if name.file or name.quant else " with a model"
        raise ModelNotFound(f"{name.id} has no GGUF file{selected}", hint=f"it has {quants}", param="model")
    if len(chosen) > 1:
        shown = ", ".join(model[0].name for model in chosen[:5])
        hint = f"copy the address of one of the files: {shown}"
        raise ModelUnusable(f"{name} selects {len(chosen)} models", hint=hint)
    _check_shards(name, [file.name for file in chosen[0]])
    return chosen[0]


def _chosen(name: HubName, models: list[list[FileType]]) -> list[list[FileType]]:
    """The models that `name` selects. Each model is the list of its files."""
    if name.file:
        return [files for files in models if first_shard(files[0].name) == first_shard(name.file)]
    sizes = ((file.name, file.size) for files in models for file in files)
    quant = name.quant or default_quant(gguf_variants(sizes))
    if not quant:
        return models
    chosen = [files for files in models if gguf_quant(files[0].name) == quant]
    # unsloth's dynamic quantisations have UD- in front
    return chosen or [files for files in models if gguf_quant(files[0].name) == f"UD-{quant}"]


def gguf_models(files: Iterable[FileType]) -> list[list[FileType]]:
    """The GGUF models among files: for each model, its file or its shards in their order."""
    models: dict[str, list[FileType]] = {}
    for file in sorted(files, key=attrgetter("name")):
        if is_gguf_model(file.name):
            models.setdefault(first_shard(file.name), []).append(file)
    return list(models.values())


def small_files(files: Sequence[FileType]) -> list[FileType]:
    """The configuration, the tokenizer and the texts of a repository; empty without config.json."""
    if not any(file.name == "config.json" for file in files):
        return []
    return _matching(sorted(files, key=attrgetter("name")), *SMALL)


def gguf_variants(files: Iterable[tuple[str, int]]) -> tuple[Variant, ...]:
    """The quantisations of the GGUF models among files, and their sizes. The smallest is first.

    `files`: pairs of name and bytes.
    """
    sizes: dict[str, int] = {}
    for name, size in files:
        quant = gguf_quant(name)
        if quant and is_gguf_model(name):
            sizes[quant] = sizes.get(quant, 0) + size
    variants = [Variant(quant, size) for quant, size in sizes.items()]
    return tuple(sorted(variants, key=attrgetter("bytes", "quant")))


def default_quant(variants: Sequence[Variant]) -> str:
    """The quantisation that represents a repository: Q4_K_M, else the smallest; empty without a variant."""
    quants = [variant.quant for variant in variants]
    return DEFAULT_QUANT if DEFAULT_QUANT in quants else "".join(quants[:1])


def gguf_quants(names: Iterable[str]) -> list[str]:
    """The GGUF quantisations of the models among these files, in upper case."""
    quants = {gguf_quant(name) for name in names if is_gguf_model(name)}
    return sorted(quants - {""})


def gguf_quant(name: str) -> str:
    """The quantisation in the name of a GGUF file, in upper case; empty if there is none."""
    matches: list[str] = GGUF_QUANT.findall(name.rpartition("/")[2])
    return matches[-1].upper() if matches else ""


def is_gguf_model(name: str) -> bool:
    """True for a GGUF file with a model; false for projectors of images and importance matrices."""
    base = name.rpartition("/")[2].lower()
    return base.endswith(GGUF) and not ("mmproj" in base or "imatrix" in base)


def first_shard(name: str) -> str:
    """The name of the first shard of the model that a GGUF file belongs to; the name itself for a model of one file."""
    shard = parse_shard(name)
    return name if shard is None or not shard.siblings else shard.siblings[0]


def _check_shards(name: HubName, files: list[str]) -> None:
    """Raises ModelUnusable if a shard is missing. `files` belong to one model."""
    missing = missing_shards(files)
    if missing:
        total = len(files) + len(missing)
        raise ModelUnusable(f"{name} lacks {len(missing)} of {total} shards: {missing[0]}", hint=OTHER_REPO)


def _matching(files: list[FileType], *patterns: str) -> list[FileType]:
    """The files that match one of the patterns. A pattern matches only names with the same number of folders."""
    matches = []
    for file in files:
        depth = file.name.count("/")
        if any(fnmatch(file.name, pattern) and pattern.count("/") == depth for pattern in patterns):
            matches.append(file)
    return matches


def _no_weights(name: HubName, files: set[str]) -> ModelUnusable:
    """The error for a repository without safetensors weights."""
    pickles = sorted(file for file in files if file.endswith(tuple(PICKLE_SUFFIXES)))
    if pickles:
        reason = f"has only pickle weights ({pickles[0]}); loading them would run code from the repo"
        return ModelUnusable(f"{name} {reason}", hint=OTHER_REPO)
    return ModelUnusable(f"{name} has no safetensors weights and no GGUF model", hint=OTHER_REPO)
