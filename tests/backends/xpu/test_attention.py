"""Attention by gather and torch's attention: every case of the op, and odd shapes, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from localllm.kernels.onednn import attention
from localllm.kernels.onednn.attention import STEP, paged_attention
from localllm.kernels.ops import Ops
from localllm.kernels.ops.attention import Attend, Rows
from localllm.kernels.ops.attention import paged_attention as reference
from localllm.kernels.ops.cases import CASES
from localllm.kernels.ops.cases.case import Case
from localllm.kernels.ops.cases.reference_check import call_op, device_arguments, mismatch, reference_run

from .stand_ins import XPU

CHANGED = [case for case in CASES if XPU.ops.title(case.op) != "reference" and "pack" not in case.op]


def inputs(seed: int, **options: Any) -> tuple[torch.Tensor, Rows, Attend]:
    """Rows of random lengths. Slots beyond a row's context, and pages of no row, are NaN."""
    random = np.random.default_rng(seed)
    page_size, kv_heads, groups, dim = (
        int(random.choice(values)) for values in ([1, 3, 16], [1, 2, 5], [1, 4], [8, 37])
    )
    contexts = random.integers(1, 2 * STEP + 9, int(random.integers(1, 6))).tolist()
    queries = [int(random.integers(1, min(context, 40) + 1)) if random.random() < 0.6 else 1 for context in contexts]
    counts = [-(-context // page_size) for context in contexts]
    ids = torch.from_numpy(random.permutation(sum(counts)) + 1).int()
    pages = torch.full((2, len(ids) + 2, page_size, kv_heads, dim), float("nan"))
    table = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    for row, (own, context) in enumerate(zip(ids.split(counts), contexts, strict=True)):
        table[row, : len(own)] = own
        flat = torch.full((2, len(own) * page_size, kv_heads, dim), float("nan"))
        flat[:, :context] = torch.randn(2, context, kv_heads, dim, generator=generator)
        pages[:, own.long()] = flat.unflatten(1, (-1, page_size))
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    query = torch.randn(sum(queries), kv_heads * groups, dim, generator=generator)
    rows = Rows(starts, torch.tensor(contexts, dtype=torch.int32), table, tuple(queries), tuple(contexts))
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(kv_heads * groups, generator=generator)
    return query, rows, Attend(pages[0], pages[1], dim**-0.5, **options)


@pytest.mark.real_otherdevice
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"window": 150}, {"soft_cap": 3.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_odd_shapes(seed: int, options: dict[str, Any]) -> None:
    query, rows, attend = inputs(seed, **options)
    expected = reference(query, rows, attend)
    assert expected.isfinite().all()
    torch.testing.assert_close(paged_attention(query, rows, attend), expected, rtol=1e-4, atol=1e-5)
    out = torch.full_like(query, float("nan"))
    assert paged_attention(query, rows, attend, out) is out
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    bounds = replace(rows, contexts=tuple(context + 7 for context in rows.contexts), exact=False)
    torch.testing.assert_close(paged_attention(query, bounds, attend), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.real_otherdevice
@pytest.mark.parametrize("case", CHANGED, ids=str)
def test_case_equals_the_reference(case: Case) -> None:
    """The cases of the self-test, of all ops that are no references."""
    for dtype, tolerance in case.tolerances.items():
        arguments, expected = reference_run(case, dict(Ops())[case.op], dtype)
        output = call_op(case, dict(XPU.ops)[case.op], device_arguments(case, XPU.ops, arguments, "cpu", dtype))
        assert not mismatch(output, expected, tolerance)


def test_the_changed_ops_are_tested() -> None:
    assert {case.op for case in CHANGED} == {"attention.paged", "linear.int4", "linear.int4_wide"}


def test_lengths_are_multiples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that decodes gives torch the same length for STEP steps, and layers with the same window share the mask."""
    lengths = []

    def attend_to(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        lengths.append(key.shape[2])
        masks.append(options["attn_mask"])
        return attend(query, key, value, **options)

    attend = F.scaled_dot_product_attention
    masks: list[torch.Tensor] = []
    monkeypatch.setattr("localllm.kernels.ops.attention.F.scaled_dot_product_attention", attend_to)
    pages = torch.randn(2, 20, 16, 1, 8)
    for context in (1, STEP - 1, STEP, STEP + 1):
        table = torch.arange(1, 20, dtype=torch.int32).unsqueeze(0)
        rows = Rows(torch.tensor([0, 1]).int(), torch.tensor([context]).int(), table, (1,), (context,))
        for _ in range(2):
            paged_attention(torch.randn(1, 1, 8), rows, Attend(pages[0], pages[1], 1.0))
        assert masks[-1] is masks[-2]
    assert lengths == [STEP] * 6 + [2 * STEP] * 2


def test_captured_steps_use_torchs_plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    monkeypatch.setattr(attention, "sdpa_kernel", lambda backend: chosen.append(backend) or torch.no_grad())
    query, rows, attend = inputs(1)
    paged_attention(query, rows, attend)
    assert not chosen
    paged_attention(query, replace(rows, exact=False), attend)
    assert chosen == [attention.SDPBackend.MATH]
