"""Compares the base model that an adapter names with the loaded model. Shapes alone do not prove a wrong base model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from ..errors import ModelRefused
from .adapter_config import CONFIG
from .adapter_files import AdapterFiles

_REPO = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._-]*(@.*)?")
_SELECTOR = re.compile(r"(?<=/)([^/:@]+):[^/:@]+")  # repo:Q4_K_M, a GGUF model of a repo
_GGUF_QUANT = re.compile(r"[-_.]i?q\d(_[a-z0-9]+)*$")  # in the name of a GGUF model, in lower case
_CACHE_FOLDER = re.compile(r"(?:^|/)models--([^/]+?)--([^/]+)(?:/|$)")  # of a repo in the Hugging Face cache
# Words at the end of a repo's name for the format of its weights; the weights are those of the model without them.
_FORMATS = frozenset(
    "2bit 3bit 4bit 5bit 6bit 8bit bit bnb nf4 fp4 fp8 nvfp4 mxfp4 mxfp8 int4 int8 w4a16 w8a8 w8a16 q4 q6 q8 awq gptq "
    "dwq gguf mlx hf bf16 fp16 fp32 f16 f32 dynamic quantized unsloth".split()
)
# Families of models whose weights have nothing in common -> words in the names of their models.
_FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "command": ("command-r", "command-a", "c4ai"),
        "ernie": ("ernie",),
        "exaone": ("exaone",),
        "gemma": ("gemma",),
        "glm": ("glm",),
        "granite": ("granite",),
        "hunyuan": ("hunyuan",),
        "llama": ("llama",),
        "minimax": ("minimax",),
        "mistral": ("mistral", "ministral", "mixtral", "codestral", "devstral", "magistral", "pixtral"),
        "olmo": ("olmo",),
        "qwen": ("qwen", "qwq"),
        "smollm": ("smollm",),
    }
)


def check_base(files: AdapterFiles, model: str, model_type: str) -> str:
    """A warning if the adapter names another base model than `model`; empty if the names agree or say nothing.

    `model`: the id or the path of the loaded model; `model_type`: the field of its config.json. Raises ModelRefused if
    the names and classes say that the two models are of different families.
    """
    base = _repo(files.base)
    loaded = _repo(model)
    if base and agree(base, model):
        return ""
    expected = _families(base) | _families(files.base_class)
    actual = _families(loaded or model) | _families(model_type)
    if expected and actual and expected.isdisjoint(actual):
        named = " of class ".join(filter(None, (files.base, files.base_class)))
        family = " and ".join(sorted(actual))
        raise ModelRefused(
            f"the adapter is for the base model {named:.200}, but {model:.200} is a {family} model",
            f"if the model is a copy of that base model, correct its name in {CONFIG}",
        )
    if not base or not loaded:
        return ""
    return f"the adapter is for the base model {base[:200]}; with {model}, its answers may be wrong"


def agree(base: str, model: str) -> bool:
    """True if the repo `base` is the model or a copy of it, by their names. Formats of the weights may differ, and the
    name of the copy may have both parts of the repo, as in `bartowski/Qwen_Qwen3-8B-GGUF`."""
    return _stem(_repo(model) or model) in (_stem(base), _stem(base.replace("/", "_")))


def _repo(name: str) -> str:
    """The repo of a base model, as `org/repo` or `repo`; empty if the name is a path."""
    cached = _CACHE_FOLDER.search(name)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    name = _SELECTOR.sub(r"\1", name)
    return name.partition("@")[0] if _REPO.fullmatch(name) else ""


def _stem(name: str) -> str:
    """The name of a repo or folder in lower case, without organisation, revision and format of the weights."""
    last = name.partition("@")[0].rstrip("/").rpartition("/")[2].lower().removesuffix(".gguf")
    words = re.split(r"[-_]", _GGUF_QUANT.sub("", last))
    while len(words) > 1 and words[-1] in _FORMATS:
        words.pop()
    return "-".join(words).removeprefix("meta-")


def _families(name: str) -> set[str]:
    stem = _stem(name)
    words = re.findall("[a-z]+", stem)
    families = {family for family, parts in _FAMILIES.items() if any(part in stem for part in parts)}
    if "phi" in words:  # a part of the word dolphin
        families.add("phi")
    return families
