"""The packed file: it is written completely or not at all, and read only if all its bytes are intact."""

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

PRODUCTS = {
    "a": Product("int8", Int8(torch.arange(-33, 33, dtype=torch.int8).view(2, 33), torch.tensor([0.5, 2.0]))),
    "static": Product(
        "int8",
        Int8(*(torch.ones(2, size).to(dtype) for size, dtype in ((4, torch.int8), (1, torch.float), (2, torch.float)))),
    ),
    "b+c": Product("int4", Int4(*(torch.full((3, 2), at, dtype=torch.uint8) for at in (7, 8, 9)), 2, 4)),
    "d": Product("fp8", Fp8(torch.ones(2, 3).to(torch.float8_e4m3fn), torch.ones(2, 1), 3)),
}
NEEDED = sum(part.nbytes for product in PRODUCTS.values() for part in weight_tensors(product.weight))


@pytest.fixture
def packed_file(tmp_path: Path) -> PackedFile:
    return PackedFile(tmp_path / "new" / "int8.safetensors", "mark", Int8)


def test_packed_file_round_trip(packed_file: PackedFile) -> None:
    assert packed_file.read() is None
    packed_file.write(PRODUCTS)
    result = packed_file.read()
    assert result is not None
    assert list(result) == list(PRODUCTS)
    for name, product in PRODUCTS.items():
        assert result[name].op == product.op
        assert type(result[name].weight) is type(product.weight)
        for one, other in zip(result[name].weight, product.weight, strict=True):
            if isinstance(other, torch.Tensor):
                assert one.dtype == other.dtype
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
                assert one.data_ptr() % ALIGNMENT == 0
            else:
                assert one == other


def test_other_fingerprint_is_not_read(packed_file: PackedFile, tmp_path: Path) -> None:
    packed_file.write(PRODUCTS)
    assert PackedFile(tmp_path / "new" / "int8.safetensors", "marks", Int8).read() is None


@pytest.mark.parametrize("lacking", [0, 1])
def test_file_is_not_written_without_spare_disk_space(
    packed_file: PackedFile, lacking: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=NEEDED + SPARE - lacking))
    packed_file.write(PRODUCTS)
    assert (packed_file.read() is None) == bool(lacking)


@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt()], ids=["full", "stopped"])
def test_unfinished_file_is_deleted(
    packed_file: PackedFile, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed_file.write(PRODUCTS)

    def blocks(self: PackedFile, products: object) -> Iterator[Any]:
        yield b"half"
        raise error

    monkeypatch.setattr(PackedFile, "_blocks", blocks)
    if isinstance(error, OSError):
        packed_file.write({})
    else:
        with pytest.raises(KeyboardInterrupt):
            packed_file.write({})
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["int8.safetensors"]
    assert packed_file.read() is not None, "the one before is as it was"


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 250, 300])
@pytest.mark.parametrize("pieces", [1, 7, 100, 300])
def test_checksums_do_not_depend_on_chunks(
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


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may read fewer bytes than requested."""
    data, into, read = bytes(range(200)), bytearray(200), checksums.os.preadv
    (tmp_path / "data").write_bytes(data)

    def short(file: int, into: list[memoryview], at: int) -> int:
        return read(file, [into[0][:30]], at)

    monkeypatch.setattr(checksums.os, "preadv", short)
    with (tmp_path / "data").open("rb") as opened:
        assert read_checked(opened.fileno(), 0, memoryview(into), [zlib.crc32(data)], 1)
    assert into == data
