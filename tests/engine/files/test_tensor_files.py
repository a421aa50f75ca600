"""Damaged and hostile safetensors files: each is refused by name, before any tensor is read."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from localllm.engine.errors import ModelRefused
from localllm.engine.files import tensor_files
from localllm.engine.files.tensor_files import ITEM_BYTES, read_header

SOUND = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def pack(header: Any, data: bytes = bytes(32), length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def changed(tensor: str, **fields: Any) -> bytes:
    return pack({**SOUND, tensor: {**SOUND[tensor], **fields}})


BAD: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "0 bytes"),
    "seven bytes": (bytes(7), "7 bytes"),
    "no header": (bytes(8), "not JSON"),
    "header longer than the file": (pack(SOUND, length=10_000), "10000 bytes"),
    "header of 2**63 bytes": (pack(SOUND, length=2**63), "9223372036854775808"),
    "header of 2**64 - 1 bytes": (pack(SOUND, length=2**64 - 1), "18446744073709551615"),
    "header cut by one": (pack(SOUND, length=len(json.dumps(SOUND)) - 1), "not JSON"),
    "not JSON": (pack(b"{'a': 1}"), "not JSON"),
    "not UTF-8": (pack(b'{"\xff": 1}'), "not JSON"),
    "deeply nested": (pack(b"[" * 200_000), "not JSON"),
    "a list": (pack([SOUND]), "a list, not an object"),
    "a number": (pack(b"17"), "a int, not an object"),
    "null": (pack(b"null"), "NoneType, not an object"),
    "a name twice": (pack(b'{"a": {}, "a": {}}'), "duplicate name"),
    "a field twice": (pack(b'{"a": {"dtype": "F32", "dtype": "F32"}}'), "duplicate name"),
    "entry is a list": (pack({"a": [1, 2]}), "'a' must have dtype"),
    "entry is null": (pack({"a": None}), "'a' must have dtype"),
    "no dtype": (pack({"a": {"shape": [1], "data_offsets": [0, 4]}}), "'a' must have dtype"),
    "no shape": (pack({"a": {"dtype": "F32", "data_offsets": [0, 4]}}), "'a' must have dtype"),
    "no offsets": (pack({"a": {"dtype": "F32", "shape": [1]}}), "'a' must have dtype"),
    "an extra field": (changed("a", stride=[1]), "'a' must have dtype"),
    "unknown dtype": (changed("a", dtype="F33"), "unknown dtype: 'F33'"),
    "dtype in small letters": (changed("a", dtype="f32"), "unknown dtype: 'f32'"),
    "dtype is a number": (changed("a", dtype=4), "unknown dtype: 4"),
    "shape is a number": (changed("a", shape=6), "invalid shape: 6"),
    "negative dimension": (changed("a", shape=[-2, -3]), "invalid shape"),
    "fraction in the shape": (changed("a", shape=[2.0, 3]), "invalid shape"),
    "true in the shape": (changed("a", shape=[True, 6]), "invalid shape"),
    "text in the shape": (changed("a", shape=["2", 3]), "invalid shape"),
    "null in the shape": (changed("a", shape=[None, 3]), "invalid shape"),
    "nine dimensions": (changed("a", shape=[1] * 7 + [2, 3]), "invalid shape"),
    "dimension of 2**63": (changed("a", shape=[2**63, 0]), "invalid shape"),
    "product beyond 64 bits": (changed("a", shape=[2**62, 2**62]), "needs"),
    "shape too large": (changed("a", shape=[2, 4]), "needs 32 bytes, but has 24"),
    "shape too small": (changed("a", shape=[2, 2]), "needs 16 bytes, but has 24"),
    "dtype too wide": (changed("b", dtype="F32"), "needs 16 bytes, but has 8"),
    "offsets are one": (changed("a", data_offsets=[24]), "invalid data_offsets"),
    "offsets are three": (changed("a", data_offsets=[0, 12, 24]), "invalid data_offsets"),
    "negative offset": (changed("a", data_offsets=[-24, 0]), "invalid data_offsets"),
    "fraction in the offsets": (changed("a", data_offsets=[0, 24.0]), "invalid data_offsets"),
    "offsets backwards": (changed("a", data_offsets=[24, 0]), "needs 24 bytes, but has -24"),
    "offsets beyond the file": (changed("b", data_offsets=[2**40, 2**40 + 8]), "gap"),
    "overlap": (changed("b", data_offsets=[20, 28]), "overlaps"),
    "same bytes twice": (
        pack({"a": SOUND["a"], "b": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}}, bytes(24)),
        "overlaps",
    ),
    "hole between": (pack({**SOUND, "b": {**SOUND["b"], "data_offsets": [26, 34]}}, bytes(34)), "leaves a gap"),
    "hole before the first": (pack({"a": {**SOUND["a"], "data_offsets": [8, 32]}}), "leaves a gap"),
    "data cut by one": (pack(SOUND, bytes(31)), "end at byte"),
    "all data missing": (pack(SOUND, b""), "end at byte"),
    "data after the last": (pack(SOUND, bytes(33)), "end at byte"),
    "a web page": (b"<!DOCTYPE html><html><body>404</body></html>", "its header needs"),
    "a pickle": (b"\x80\x04\x95" + bytes(100), "its header needs"),
    "a pointer of git-lfs": (b"version https://git-lfs.github.com/spec/v1\n" * 3, "its header needs"),
}


@pytest.mark.parametrize("name", BAD)
def test_damage_is_refused_by_name(name: str, tmp_path: Path) -> None:
    content, reason = BAD[name]
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelRefused) as refused:
        read_header(file)
    assert "model.safetensors" in str(refused.value)
    assert reason in str(refused.value)
    assert refused.value.hint


def test_sound_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(pack({"__metadata__": {"format": "pt"}, **SOUND}))
    tensors = read_header(file)
    assert list(tensors) == ["a", "b"]
    assert tensors["b"].shape == (4,)
    assert tensors["b"].num_bytes == 8
    assert tensors["b"].stop == file.stat().st_size


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_values_are_as_long_as_their_dtype_says(size: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    names = [name for name, item in ITEM_BYTES.items() if item == size]
    assert {
        name: int("".join(filter(str.isdigit, name.partition("_")[0])) or 8) // 8 for name in names
    } == dict.fromkeys(names, size)
    for name in names:
        file.write_bytes(
            pack({"a": {"dtype": name, "shape": [1] * 7 + [3], "data_offsets": [0, 3 * size]}}, bytes(3 * size))
        )
        assert read_header(file)["a"].shape == (1, 1, 1, 1, 1, 1, 1, 3)


def test_a_header_may_be_as_long_as_the_format_s_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, length = tmp_path / "model.safetensors", len(json.dumps(SOUND))
    file.write_bytes(pack(SOUND))
    monkeypatch.setattr(tensor_files, "MAX_HEADER", length)
    assert read_header(file)
    monkeypatch.setattr(tensor_files, "MAX_HEADER", length - 1)
    with pytest.raises(ModelRefused, match=f"its header needs {length} bytes"):
        read_header(file)


def test_a_file_may_end_with_its_header(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(pack({}, b""))
    assert read_header(file) == {}


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "empty": np.zeros((0, 4), np.float16)}
    save_file(arrays, file)
    tensors = read_header(file)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {"x": (2, 3), "empty": (0, 4)}
    start, stop = tensors["x"].start, tensors["x"].stop
    assert np.array_equal(np.frombuffer(file.read_bytes()[start:stop], np.float32).reshape(2, 3), arrays["x"])


@pytest.mark.parametrize("position", range(0, 200, 3))
def test_any_flipped_byte_of_a_header_is_refused_or_harmless(position: int, tmp_path: Path) -> None:
    """If the header is accepted, its tensors lie inside the file."""
    content = bytearray(pack(SOUND))
    position %= len(content) - 32
    content[position] ^= 0x15
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    try:
        tensors = read_header(file)
    except ModelRefused:
        return
    assert all(0 < tensor.start <= tensor.stop <= len(content) for tensor in tensors.values())


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["a pipe", "a folder"])
def test_only_regular_files_are_opened(make: Callable[[Path], None], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    make(file)
    with pytest.raises(ModelRefused, match="not a regular file"):
        read_header(file)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="cannot be read: No such file"):
        read_header(tmp_path / "model.safetensors")
