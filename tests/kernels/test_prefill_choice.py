"""The batches that prefill attention of the CUDA library supports, and their numbers of tiles. The tests need no
GPU."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm import kernels
from localllm.kernels.ops.attention import Attend, Rows

FILE = Path(next(iter(kernels.__path__))) / "cuda" / "attention" / "prefill.py"
PROMPT = [(600, 600)]


@pytest.fixture
def choice(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The wrapper without its library, on a simulated GPU with 132 multiprocessors."""
    spec = spec_from_file_location("localllm.kernels.cuda.attention.prefill", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_prefill", object())
    monkeypatch.setattr(module, "_processors", lambda device: 132)
    return module


def rows(lens: list[tuple[int, int]]) -> Rows:
    queries, contexts = zip(*lens, strict=True)
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    return Rows(starts, torch.tensor(contexts).int(), torch.zeros(len(lens), 400, dtype=torch.int32), queries, contexts)


def batch(
    lens: list[tuple[int, int]] = PROMPT,
    page_size: int = 16,
    heads: int = 32,
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    cache: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Rows, Attend]:
    pages = torch.empty(2, 4, page_size, 8, dim).to(cache)
    query = torch.empty(sum(queries for queries, _ in lens), heads, dim, dtype=dtype)
    return query, rows(lens), Attend(pages[0], pages[1], 1.0)


@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128, 256, 384])
def test_page_sizes_that_divide_a_block_are_supported(choice: ModuleType, page_size: int) -> None:
    assert choice.supports(*batch(page_size=page_size))


@pytest.mark.parametrize("page_size", [1, 4, 24, 96, 192, 200])
def test_other_page_sizes_are_not_supported(choice: ModuleType, page_size: int) -> None:
    assert not choice.supports(*batch(page_size=page_size))


@pytest.mark.parametrize(
    "options",
    [
        {"lens": [(4, 600)]},
        {"lens": [(1, 9)] * 4},
        {"lens": [(40, 2000)]},  # 16 tiles with a long way to go: split, they fill the device
        {"dim": 80},
        {"dim": 256},
        {"dtype": torch.float32, "cache": torch.float32},
        {"cache": torch.float8_e4m3fn},
    ],
    ids=str,
)
def test_unsupported_batches(choice: ModuleType, options: dict[str, Any]) -> None:
    assert not choice.supports(*batch(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"lens": [(1, 700), (600, 600), (4, 9)]},
        {"lens": [(40, 1000)]},
        {"lens": [(200, 2000)]},
        {"dim": 64, "heads": 8},
        {"heads": 56},
        {"dtype": torch.float16, "cache": torch.float16},
    ],
    ids=str,
)
def test_supported_batches(choice: ModuleType, options: dict[str, Any]) -> None:
    assert choice.supports(*batch(**options))


def test_strided_queries_are_supported_and_unaligned_queries_are_not(choice: ModuleType) -> None:
    query, own, attend = batch()
    beside = torch.empty(len(query), 48, 128, dtype=query.dtype)
    assert choice.supports(beside[:, :32], own, attend)
    shifted = torch.empty(query.numel() + 1, dtype=query.dtype)[1:].view_as(query)
    assert not choice.supports(shifted, own, attend)
    other_strides = attend.value_pages.transpose(1, 2).contiguous().transpose(1, 2)
    assert not choice.supports(query, own, attend._replace(value_pages=other_strides))


def test_nothing_is_supported_without_the_kernel_or_on_other_devices(
    choice: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_processors", lambda device: 0)
    assert not choice.supports(*batch())
    monkeypatch.setattr(choice, "_processors", lambda device: 132)
    monkeypatch.setattr(choice, "_prefill", None)
    assert not choice.supports(*batch())


def test_tiles_hold_128_lines_and_rows_with_fewer_queries_have_none(choice: ModuleType) -> None:
    lens = [(1, 5), (33, 90), (64, 64), (3, 3)]
    assert choice.tiles_of(rows(lens), 4, 2) == 2 + 2 + 1
    assert choice.tiles_of(rows(lens), 4, 1) == 6
    assert choice.tiles_of(rows(lens), 1, 4) == 2
    assert choice.tiles_of(rows(lens), 7, 4) == 2 + 4  # 18 queries times 7 heads
