"""The pooling of an embedding model, from files of sentence-transformers or the metadata of a GGUF file -> Pooling.

Only one kind of pooling is computed: the hidden state of the last token. Any other instruction in the files is a reason
to refuse embeddings (Pooling.problem), because a vector that ignores the instruction would be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import ModelRefused
from .fields import Fields
from .json_files import read_json, read_json_list
from .model_files import MODULES, ModelFiles

SENTENCES = "sentence_bert_config.json"  # settings of the module Transformer
PROMPTS = "config_sentence_transformers.json"
LAST_TOKEN = "last token"

_SUPPORTED_MODULES = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
_PACKAGE = "sentence_transformers."
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}")
_MODE = "pooling_mode_"  # beginning of the fields of the module Pooling
# Field of the module Pooling -> pooling mode. The vectors of several modes are joined.
_MODES: Mapping[str, str] = MappingProxyType(
    {
        "pooling_mode_cls_token": "cls",
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_max_tokens": "max",
        "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
        "pooling_mode_weightedmean_tokens": "weightedmean",
        "pooling_mode_lasttoken": LAST_TOKEN,
    }
)
_GGUF_MODES: Mapping[int, str] = MappingProxyType({0: "none", 1: "mean", 2: "cls", 3: LAST_TOKEN, 4: "rank"})
# Models whose files do not say that a vector may be cut, but whose model cards do: names, and the smallest size.
_CUT_BY_NAME = ((re.compile(r"Qwen/Qwen3-Embedding-[0-9.]+B(-GGUF)?([:@].*)?", re.DOTALL), 32),)


@dataclass(frozen=True, slots=True)
class Pooling:
    """The conversion of the hidden states of a text to one vector."""

    size: int  # numbers in a vector
    normalised: bool = True  # whether a vector is divided by its Euclidean length
    prompt: str = ""  # text that precedes every input
    max_tokens: int = 0  # maximum number of tokens of an input; 0: the context
    min_size: int = 0  # smallest size to which a vector may be cut (Matryoshka); 0: it may not
    sizes: tuple[int, ...] = ()  # the only sizes to which a vector may be cut; empty: every size from min_size on
    problem: str = ""  # the reason why localllm computes no embeddings of this model; empty: it does

    @property
    def title(self) -> str:
        """A description for the user, such as "last token, normalised, 32 to 1024 numbers"."""
        if self.problem:
            return f"none: {self.problem}"
        return f"{LAST_TOKEN}, {'normalised' if self.normalised else 'not normalised'}, {self.sizes_title} numbers"

    @property
    def sizes_title(self) -> str:
        """The sizes that a client may request."""
        if self.sizes:
            return ", ".join(map(str, self.sizes))
        return f"{self.min_size} to {self.size}" if self.min_size else str(self.size)

    def allows(self, size: int) -> bool:
        """Whether a client may request vectors of `size` numbers."""
        if self.sizes:
            return size in self.sizes
        return (self.min_size or self.size) <= size <= self.size


def read_pooling(files: ModelFiles) -> Pooling | None:
    """The pooling that the files of a model describe; None if they describe none. Never raises: files that are damaged
    or not supported give a `problem`."""
    try:
        return _of_gguf(files) if files.gguf else _of_folder(files)
    except ModelRefused as error:
        return Pooling(files.config.hidden_size, problem=str(error))


def _of_gguf(files: ModelFiles) -> Pooling | None:
    architecture = files.config.model_type
    size = files.config.hidden_size
    fields = Fields(files.metadata, files.path.name)
    key = f"{architecture}.pooling_type"
    if key not in fields:
        return None
    number = fields.integer(key, 0, 2**31 - 1)
    _check_mode([_GGUF_MODES.get(number, f"type {number}")], files.path.name)
    fields.integer(f"{architecture}.embedding_length_out", size, size, size)
    return Pooling(size, min_size=_known_min_size(files.name))  # as llama-server: always normalised


def _of_folder(files: ModelFiles) -> Pooling | None:
    folder = files.path
    if not (folder / MODULES).exists():
        return None
    size = files.config.hidden_size
    modules = _modules(folder)
    file = modules["Pooling"]
    if not (folder / file).exists():
        raise ModelRefused(f"{file} is missing: download the model again")
    pooling = Fields(read_json(folder / file), file)
    _check_mode(_modes(pooling), file)
    pooling.integer("word_embedding_dimension", size, size, size)
    sentences = _optional(folder / SENTENCES)
    if sentences.flag("do_lower_case", False):
        raise ModelRefused(f"{SENTENCES}: do_lower_case is not supported")
    config = Fields(read_json(folder / "config.json"), "config.json")
    if "AutoModel" in config.table("auto_map"):
        raise ModelRefused("config.json: auto_map names code that computes the hidden states; localllm never runs it")
    min_size, sizes = _cuts(config, size)
    return Pooling(
        size,
        normalised="Normalize" in modules,
        prompt=_prompt(_optional(folder / PROMPTS)),
        max_tokens=sentences.integer("max_seq_length", 1, 2**27, 0),
        min_size=min_size or _known_min_size(files.name),
        sizes=sizes,
    )


def _modules(folder: Path) -> dict[str, str]:
    """Kind of each module of modules.json -> the file with its configuration. Raises ModelRefused for modules that
    localllm does not compute."""
    modules: dict[str, str] = {}
    kinds: list[str] = []
    for entry in read_json_list(folder / MODULES):
        if not isinstance(entry, dict):
            raise ModelRefused(f"{MODULES} must be a list of objects")
        module = Fields(entry, MODULES)
        kind = module.text("type")
        path = module.text("path")
        if path and not _FOLDER.fullmatch(path):
            raise ModelRefused(f"{MODULES} names {path!r:.200}, which is not a folder of the model")
        kinds.append(kind.rpartition(".")[2] if kind.startswith(_PACKAGE) else kind[:100])
        modules[kinds[-1]] = f"{path}/config.json" if path else "config.json"
    if kinds not in _SUPPORTED_MODULES or modules["Transformer"] != "config.json":
        raise ModelRefused(
            f"{MODULES}: the modules {', '.join(kinds) or 'none'} are not supported; supported are Transformer in the "
            "folder of the model, Pooling, Normalize"
        )
    return modules


def _modes(fields: Fields) -> list[str]:
    """The pooling modes. As in sentence-transformers, the mode is mean if the configuration names none."""
    if "pooling_mode" not in fields:
        modes = [mode for key, mode in _MODES.items() if fields.flag(key, key == "pooling_mode_mean_tokens")]
        unknown = [key for key in fields if key.startswith(_MODE) and key not in _MODES and fields.get(key)]
        return modes + [key.removeprefix(_MODE)[:100] for key in unknown]
    names = fields.get("pooling_mode")
    named = names if isinstance(names, list) else [names]
    return [LAST_TOKEN if name == "lasttoken" else str(name)[:100] for name in named]


def _check_mode(modes: list[str], where: str) -> None:
    if modes != [LAST_TOKEN]:
        names = " and ".join(modes) or "none"
        raise ModelRefused(f"{where}: the pooling {names} is not supported, only that of the {LAST_TOKEN}")


def _prompt(fields: Fields) -> str:
    """The text that sentence-transformers puts before every input."""
    name = fields.text("default_prompt_name", "")
    if fields.get("truncate_dim") is not None:
        raise ModelRefused(f"{PROMPTS}: truncate_dim is not supported")
    if not name:
        return ""
    prompts = fields.get("prompts")
    prompt = prompts.get(name) if isinstance(prompts, dict) else None
    if not isinstance(prompt, str):
        raise fields.refuse("default_prompt_name", "the name of one of the prompts")
    return prompt


def _cuts(config: Fields, size: int) -> tuple[int, tuple[int, ...]]:
    """(smallest size, the only sizes) to which a vector may be cut, from config.json with the keys of vLLM."""
    listed: Any = config.get("matryoshka_dimensions")
    if listed is None:
        return int(config.flag("is_matryoshka", False)), ()
    if not isinstance(listed, list) or not all(type(value) is int and 1 <= value <= size for value in listed):
        raise config.refuse("matryoshka_dimensions", f"a list of integers in 1…{size}")
    sizes = tuple(sorted({*listed, size}))
    return sizes[0], sizes


def _known_min_size(name: str) -> int:
    sizes = [size for pattern, size in _CUT_BY_NAME if pattern.fullmatch(name)]
    return sizes[0] if sizes else 0


def _optional(file: Path) -> Fields:
    """The fields of a JSON file; none if the file does not exist."""
    return Fields(read_json(file) if file.exists() else {}, file.name)
