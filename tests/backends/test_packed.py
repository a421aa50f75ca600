"""The file that packed weights are kept in: whole or not there, and believed only where every byte is as written."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from localllm.backends.pytorch import checksums
from localllm.backends.pytorch.checksums import Checksums, count, read_checked
from localllm.backends.pytorch.packed import ALIGNMENT, SPARE, PackedFile
from localllm.kernels.ops.linear import Fp8, Int4, Int8, weight_tensors
from localllm.kernels.ops.projection import Product

MADE = {
    "a": Product("int8", Int8(torch.arange(-33, 33, dtype=torch.int8).view(2, 33), torch.tensor([0.5, 2.0]))),
    "b+c": Product("int4", Int4(*(torch.full((3, 2), at, dtype=torch.uint8) for at in (7, 8, 9)), 2, 4)),
    "d": Product("fp8", Fp8(torch.ones(2, 3).to(torch.float8_e4m3fn), torch.ones(2, 1), 3)),
}
NEEDED = sum(part.nbytes for product in MADE.values() for part in weight_tensors(product.weight))


@pytest.fixture
def kept(tmp_path: Path) -> PackedFile:
    return PackedFile(tmp_path / "new" / "int8.safetensors", "mark", Int8)


def test_what_is_read_is_what_was_written(kept: PackedFile) -> None:
    assert kept.read() is None
    kept.write(MADE)
    found = kept.read()
    assert found is not None
    assert list(found) == list(MADE)
    for name, product in MADE.items():
        assert found[name].op == product.op
        assert type(found[name].weight) is type(product.weight)
        for one, other in zip(found[name].weight, product.weight, strict=True):
            if isinstance(other, torch.Tensor):
                assert one.dtype == other.dtype
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
                assert one.data_ptr() % ALIGNMENT == 0
            else:
                assert one == other


def test_another_mark_is_another_s(kept: PackedFile, tmp_path: Path) -> None:
    kept.write(MADE)
    assert PackedFile(tmp_path / "new" / "int8.safetensors", "marks", Int8).read() is None


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_disk_keeps_some_room(kept: PackedFile, lacking: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=NEEDED + SPARE - lacking))
    kept.write(MADE)
    assert (kept.read() is None) == bool(lacking)


@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt()], ids=["full", "stopped"])
def test_a_file_that_is_not_finished_goes(
    kept: PackedFile, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.write(MADE)

    def blocks(self: PackedFile, products: object) -> Iterator[Any]:
        yield b"half"
        raise error

    monkeypatch.setattr(PackedFile, "_blocks", blocks)
    if isinstance(error, OSError):
        kept.write({})
    else:
        with pytest.raises(KeyboardInterrupt):
            kept.write({})
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["int8.safetensors"]
    assert kept.read() is not None, "the one before is as it was"


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 250, 300])
@pytest.mark.parametrize("pieces", [1, 7, 100, 300])
def test_checksums_are_of_blocks_however_the_data_comes(
    size: int, pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "BLOCK", 100)
    data = bytes(at % 251 for at in range(size))
    sums = Checksums(b"header")
    for start in range(0, size, pieces):
        sums.add(memoryview(data[start : start + pieces]))
    blocks = [data[at : at + 100] for at in range(0, size, 100)]
    assert sums.values == [zlib.crc32(b"header"), *map(zlib.crc32, blocks)]
    assert count(size) == len(sums.values)
    file, into = tmp_path / "data", bytearray(size)
    file.write_bytes(b"before" + data + b"after")
    with file.open("rb") as opened:
        assert read_checked(opened.fileno(), 6, memoryview(into), sums.values[1:], 2)
        assert into == data
        for block in range(len(blocks)):
            wrong = [value + (at == block) for at, value in enumerate(sums.values[1:])]
            assert not read_checked(opened.fileno(), 6, memoryview(into), wrong, 2)
    if size:
        file.write_bytes(b"before" + data[:-1])
        with file.open("rb") as opened:
            assert not read_checked(opened.fileno(), 6, memoryview(into), sums.values[1:], 2), "one byte short"


def test_short_reads_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system reads as much as it likes in one go."""
    data, into, read = bytes(range(200)), bytearray(200), checksums.os.preadv
    (tmp_path / "data").write_bytes(data)

    def short(file: int, into: list[memoryview], at: int) -> int:
        return read(file, [into[0][:30]], at)

    monkeypatch.setattr(checksums.os, "preadv", short)
    with (tmp_path / "data").open("rb") as opened:
        assert read_checked(opened.fileno(), 0, memoryview(into), [zlib.crc32(data)], 1)
    assert into == data
