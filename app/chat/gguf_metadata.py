"""The chat templates and special tokens in the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from ...engine.ggufvalues import Value

_TEMPLATE = "tokenizer.chat_template"
# Variable of chat templates -> key of its token id after "tokenizer.ggml.".
SPECIAL_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "pad_token": "padding_token_id",
        "unk_token": "unknown_token_id",
    }
)


def chat_templates(metadata: Mapping[str, Value]) -> dict[str, str]:
    """Chat templates by name: "default", and "tool_use" for some models."""
    templates = {}
    for key, value in metadata.items():
        name = key.removeprefix(f"{_TEMPLATE}.")
        if key == _TEMPLATE:
            name = "default"
        elif name == key:
            continue
        if isinstance(value, str):
            templates[name] = value
    return templates


def token_ids(metadata: Mapping[str, Value], vocab_size: int) -> dict[str, int]:
    """The ids of special tokens by the names of template variables. Ids outside the vocabulary are left out."""
    values = ((name, metadata.get(f"tokenizer.ggml.{key}")) for name, key in SPECIAL_KEYS.items())
    return dict(_valid(values, vocab_size))


def _valid(values: Iterable[tuple[str, Value | None]], vocab_size: int) -> Iterable[tuple[str, int]]:
    for name, value in values:
        if type(value) is int and 0 <= value < vocab_size:
            yield name, value
