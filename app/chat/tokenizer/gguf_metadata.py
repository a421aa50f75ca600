"""The chat templates and special tokens in the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ....engine.files.gguf_values import Value
from ....engine.files.model_config import MAX_VOCAB

BYTE_LEVEL = "gpt2"  # tokenizer.ggml.model of vocabularies in which each special token has metadata
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
# Variable of chat templates -> name in llama.cpp, for tokens that the other vocabularies have without metadata.
DEFAULT_TOKENS: Mapping[str, str] = MappingProxyType({"bos_token": "bos", "eos_token": "eos", "pad_token": "pad"})


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
    ids = {}
    for name, key in SPECIAL_KEYS.items():
        token = metadata.get(f"tokenizer.ggml.{key}")
        if type(token) is int and 0 <= token < vocab_size:
            ids[name] = token
    return ids


def example_tokens(metadata: Mapping[str, Value]) -> dict[str, str]:
    """Example texts of the special tokens, by the names of template variables. The header has no texts of tokens."""
    names = set(token_ids(metadata, MAX_VOCAB))
    if metadata.get("tokenizer.ggml.model") != BYTE_LEVEL:
        names |= DEFAULT_TOKENS.keys()
    return {name: f"<{name}>" for name in sorted(names)}
