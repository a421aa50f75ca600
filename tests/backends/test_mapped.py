"""Tensors as views of a file: all dtypes, at all offsets."""

from __future__ import annotations

import json
import mmap
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from localllm.backends.pytorch.mapped import DTYPES, MappedFiles
from localllm.engine.errors import ModelRefused
from localllm.engine.files.tensor_files import ITEM_BYTES, StoredTensor, read_header


def written(file: Path, tensors: dict[str, tuple[str, list[int], bytes]], padding: int = 0) -> Path:
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode() + b" " * padding
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))
    return file


@pytest.mark.parametrize("padding", range(8))
def test_all_dtypes_are_read_exactly_at_any_offset(padding: int, tmp_path: Path) -> None:
    stored = {
        name: (name, [3, 2], bytes(range(at, at + 6 * ITEM_BYTES[name]))) for at, name in enumerate(DTYPES, start=1)
    }
    stored["BOOL"] = ("BOOL", [3, 2], bytes([1, 0, 0, 1, 1, 0]))
    files = MappedFiles()
    for name, tensor in read_header(written(tmp_path / "model.safetensors", stored, padding)).items():
        result = files.tensor(tensor)
        assert result.dtype.itemsize == ITEM_BYTES[name]
        copied = bool(tensor.start % ITEM_BYTES[name])
        assert (files.tensor(tensor).data_ptr() != result.data_ptr()) == copied, "memory only where it must be"
        assert (result.dtype, result.shape) == (DTYPES[name], (3, 2))
        assert bytes(result.view(torch.uint8).flatten().tolist()) == stored[name][2]
        files.drop(tensor)
        assert bytes(result.view(torch.uint8).flatten().tolist()) == stored[name][2], "read from the file anew"


def test_empty_tensor_and_scalar_are_read(tmp_path: Path) -> None:
    file = written(tmp_path / "m.safetensors", {"none": ("F32", [0, 5], b""), "one": ("I64", [], bytes([7] + [0] * 7))})
    tensors, files = read_header(file), MappedFiles()
    assert files.tensor(tensors["none"]).shape == (0, 5)
    assert files.tensor(tensors["one"]).item() == 7


def test_drop_releases_the_pages_of_one_tensor(tmp_path: Path) -> None:
    page = mmap.PAGESIZE
    stored = {name: ("U8", [3 * page], bytes(3 * page)) for name in "ab"}
    tensors = read_header(written(tmp_path / "model.safetensors", stored))
    files, advised = MappedFiles(), []
    files.tensor(tensors["a"])
    files._maps[tensors["b"].file] = SimpleNamespace(madvise=lambda *arguments: advised.append(arguments))  # type: ignore[assignment]
    files.drop(tensors["b"])
    ((advice, start, length),) = advised
    assert advice == mmap.MADV_DONTNEED
    assert start % page == 0
    assert start <= tensors["b"].start < start + page
    assert start + length == tensors["b"].stop


def test_drop_accepts_unread_tensors_and_missing_files_are_refused(tmp_path: Path) -> None:
    stored, files = StoredTensor(tmp_path / "gone.safetensors", "F32", (1,), 8, 12), MappedFiles()
    files.drop(stored)
    with pytest.raises(ModelRefused, match=r"gone\.safetensors cannot be read"):
        files.tensor(stored)
