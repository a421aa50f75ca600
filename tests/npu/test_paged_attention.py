"""The NPU's paged attention equals the reference: rows of any lengths, windows, sinks, in all implementations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch_npu
from torch import Tensor

from localllm.backends.npu.attention import ATTENTION, INT8_COPY, OTHERS
from localllm.backends.npu.cache import WRITES
from localllm.kernels.ops.attention import Attend, Rows, paged_attention
from localllm.kernels.ops.kv import Append

from . import kernels
from .op_cases import check_cases

pytestmark = pytest.mark.emulated
PAGED = {"lengths": ATTENTION.paged, **OTHERS}
PAGE, HEADS, KV_HEADS, DIM = 128, 8, 2, 128
STEPS = {  # the queries and the contexts of the rows
    "decode": ((1, 1, 1), (1, 300, 129)),
    "mixed": ((5, 1, 1, 7), (5, 200, 3, 384)),
    "equal": ((4, 4), (130, 4)),
    "prefill": ((9, 3, 2), (9, 150, 380)),
}


@pytest.mark.parametrize("name", PAGED)
@torch.inference_mode()
def test_small_pages(name: str) -> None:
    """They have no kernel."""
    check_cases("attention", replace(ATTENTION, paged=PAGED[name]))


def step(queries: tuple[int, ...], contexts: tuple[int, ...]) -> tuple[Tensor, Rows, Attend]:
    """The queries, rows and cache of a step. The pages of a row are in any order."""
    generator = torch.Generator().manual_seed(sum(queries))
    count = len(queries)
    pages = torch.randn(2, 3 * count + 1, PAGE, KV_HEADS, DIM, generator=generator)
    table = torch.randperm(3 * count, generator=generator).view(count, 3) + 1
    starts = torch.tensor([0, *queries]).cumsum(0)
    query = torch.randn(int(starts[-1]), HEADS, DIM, generator=generator)
    rows = Rows(starts.int(), torch.tensor(contexts).int(), table.int(), queries, contexts)
    return query, rows, Attend(pages[0], pages[1], DIM**-0.5)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("lengths", STEPS)
@pytest.mark.parametrize("name", PAGED)
@torch.inference_mode()
def test_large_pages(name: str, lengths: str, window: int, sinks: bool) -> None:
    query, rows, attend = step(*STEPS[lengths])
    attend = attend._replace(window=window, sinks=torch.randn(HEADS) if sinks else None)
    expected = paged_attention(query, rows, attend)
    key, value = (pages.to("npu", torch.bfloat16) for pages in attend[:2])
    on_npu = attend._replace(key_pages=key, value_pages=value)
    if attend.sinks is not None:
        on_npu = on_npu._replace(sinks=attend.sinks.to("npu"))
    tensors = {name: getattr(rows, name).to("npu") for name in ("row_starts", "context_lens", "page_table")}
    before = kernels.calls.total()
    actual = PAGED[name](query.to("npu", torch.bfloat16), replace(rows, **tensors), on_npu)
    assert kernels.calls.total() > before
    torch.testing.assert_close(actual.cpu().float(), expected, rtol=2e-2, atol=2e-2)


@torch.inference_mode()
def test_a_step_converts_the_int8_pages_of_one_row_at_a_time() -> None:
    """The memory of the conversion is INT8_COPY bytes for each key number of one row, beside small tensors."""
    rows = 4
    query, step_rows, attend = step((4,) * rows, (380,) * rows)
    integers = torch.zeros(2, len(attend.key_pages), PAGE, KV_HEADS, DIM, dtype=torch.int8, device="npu")
    scales = torch.ones(2, len(attend.key_pages), KV_HEADS, PAGE, device="npu")
    on_npu = Attend(integers[0], integers[1], attend.scale, scales=scales)
    tensors = {name: getattr(step_rows, name).to("npu") for name in ("row_starts", "context_lens", "page_table")}
    moved = replace(step_rows, **tensors)
    query = query.to("npu", torch.bfloat16)
    ATTENTION.paged(query, moved, on_npu)
    torch_npu.npu.reset_peak_memory_stats()
    before = torch_npu.npu.memory_allocated()
    ATTENTION.paged(query, moved, on_npu)
    used = torch_npu.npu.max_memory_allocated() - before
    numbers = 3 * PAGE * KV_HEADS * DIM
    assert 0.9 * INT8_COPY * numbers < used < 1.25 * INT8_COPY * numbers


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("lengths", STEPS)
@pytest.mark.parametrize("name", PAGED)
@torch.inference_mode()
def test_int8_pages(name: str, lengths: str, window: int) -> None:
    """Written by the op that appends, and read by the kernels. The reference over the same integers is the judge."""
    query, rows, attend = step(*STEPS[lengths])
    attend = attend._replace(window=window)
    pages = len(attend.key_pages)
    integers = torch.full((2, pages, PAGE, KV_HEADS, DIM), 99, dtype=torch.int8, device="npu")
    scales = torch.full((2, pages, KV_HEADS, PAGE), float("nan"), device="npu")
    target = Append(integers[0], integers[1], "neox", scales=scales)
    slots = (rows.page_table.long().view(-1, 1) * PAGE + torch.arange(PAGE)).flatten()
    key, value = (part.flatten(0, 1)[slots].bfloat16() for part in (attend.key_pages, attend.value_pages))
    WRITES.append(
        torch.cat((key, value), dim=1).to("npu"),
        torch.ones(len(slots), DIM // 2, device="npu"),
        torch.zeros(len(slots), DIM // 2, device="npu"),
        slots.to("npu"),
        target,
    )
    stored = Attend(integers[0].cpu(), integers[1].cpu(), attend.scale, window, scales=scales.cpu())
    exact = paged_attention(query, rows, attend)
    expected = paged_attention(query, rows, stored)
    assert (expected - exact).abs().max() < 0.1  # the rounding of keys and values
    tensors = {name: getattr(rows, name).to("npu") for name in ("row_starts", "context_lens", "page_table")}
    on_npu = Attend(integers[0], integers[1], attend.scale, window, scales=scales)
    before = kernels.calls.total()
    actual = PAGED[name](query.to("npu", torch.bfloat16), replace(rows, **tensors), on_npu)
    assert kernels.calls.total() > before
    torch.testing.assert_close(actual.cpu().float(), expected, rtol=2e-2, atol=2e-2)
