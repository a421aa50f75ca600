"""Builds GGUF files: field by field, so that a test can change any one field, or from metadata."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

U32 = "<I"
U64 = "<Q"
ALIGNMENT = 32


@dataclass(slots=True)
class GgufFile:
    """The fields of a header in their order: name -> (format, value). A format "s" is raw bytes."""

    fields: dict[str, tuple[str, int | float | bytes]] = field(default_factory=dict)
    data: bytes = b""
    alignment: int = ALIGNMENT

    def add(self, name: str, form: str, value: int | float | bytes) -> None:
        assert name not in self.fields
        self.fields[name] = form, value

    def add_text(self, name: str, text: str | bytes) -> None:
        raw = text.encode() if isinstance(text, str) else text
        self.add(f"{name} length", U64, len(raw))
        self.add(name, "s", raw)

    def content(self, **changes: int | bytes) -> bytes:
        """The file. `changes`: name of a field -> another value; underscores stand for spaces."""
        values = dict(self.fields)
        for changed, value in changes.items():
            name = changed.replace("_", " ")
            values[name] = values[name][0], value
        header = b"".join(_packed(form, value) for form, value in values.values())
        return header + bytes(-len(header) % self.alignment) + self.data


def _packed(form: str, value: int | float | bytes) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, int) and form in (U32, U64):
        value %= 1 << 8 * struct.calcsize(form)  # -1 is the largest number
    return struct.pack(form, value)


def sound() -> GgufFile:
    """A small file with every kind of field: texts, numbers, arrays, two tensors."""
    file = GgufFile()
    file.add("magic", "s", b"GGUF")
    file.add("version", U32, 3)
    file.add("tensors", U64, 2)
    file.add("entries", U64, 6)
    file.add_text("key", "general.architecture")
    file.add("type", U32, 8)
    file.add_text("value", "llama")
    file.add_text("alignment key", "general.alignment")
    file.add("alignment type", U32, 4)
    file.add("alignment", U32, ALIGNMENT)
    file.add_text("flag key", "tokenizer.ggml.add_bos_token")
    file.add("flag type", U32, 7)
    file.add("flag", "<B", 1)
    file.add_text("float key", "llama.rope.freq_base")
    file.add("float type", U32, 6)
    file.add("float", "<f", 10000.0)
    file.add_text("texts key", "tokenizer.ggml.tokens")
    file.add("texts type", U32, 9)
    file.add("texts item type", U32, 8)
    file.add("texts count", U64, 2)
    file.add_text("first text", "<s>")
    file.add_text("second text", "a")
    file.add_text("numbers key", "llama.attention.head_count_kv")
    file.add("numbers type", U32, 9)
    file.add("numbers item type", U32, 5)
    file.add("numbers count", U64, 2)
    file.add("number 0", "<i", 8)
    file.add("number 1", "<i", 4)
    file.add_text("tensor", "token_embd.weight")
    file.add("dimensions", U32, 2)
    file.add("columns", U64, 256)
    file.add("rows", U64, 3)
    file.add("dtype", U32, 12)  # Q4_K
    file.add("offset", U64, 0)
    file.add_text("second tensor", "output_norm.weight")
    file.add("second dimensions", U32, 1)
    file.add("second columns", U64, 4)
    file.add("second dtype", U32, 0)  # F32
    file.add("second offset", U64, 448)  # 3 x 144 bytes, padded
    file.data = bytes(448 + 32)
    return file


TINY: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 500_000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "</s>", "<eot>"],
    "tokenizer.ggml.eos_token_id": 2,
}


def model(metadata: Mapping[str, Any], tensors: Sequence[str] = ("token_embd.weight",)) -> bytes:
    """A file with this metadata, and with tensors of 4 F32 values. Numbers are 32 bits wide, signed in lists."""
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        header += _text(key) + _typed(value)
    for index, name in enumerate(tensors):
        header += _text(name) + struct.pack("<IQIQ", 1, 4, 0, index * ALIGNMENT)
    return header + bytes(-len(header) % ALIGNMENT) + bytes(len(tensors) * ALIGNMENT)


def _typed(value: Any) -> bytes:
    if isinstance(value, list):
        items = [struct.pack("<Ii", 5, item) if type(item) is int else _typed(item) for item in value]
        kind = items[0][:4] if items else struct.pack("<I", 8)
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)
    if isinstance(value, str | bytes):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<II", 4, value) if value >= 0 else struct.pack("<Ii", 5, value)


def _text(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw
