"""The Triton products against the references: on a GPU, or float32 in the interpreter (test_triton_interpreted.py)."""

from __future__ import annotations

import os

import pytest
import torch

from localllm.kernels.ops import CASES, Ops
from localllm.kernels.ops.case import Case
from localllm.kernels.ops.judge import answer, moved

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="there is no GPU"),
]
RUNS = [
    (case, dtype)
    for case in CASES
    if case.op in ("linear.int8", "linear.int4", "linear.int4_wide", "linear.fp8")
    for dtype in case.tolerances
    if not INTERPRETED or dtype == torch.float32
]


@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=[f"{case}-{dtype}" for case, dtype in RUNS])
def test_op_equals_reference(case: Case, dtype: torch.dtype) -> None:
    from localllm.kernels.triton import linear

    arguments = dict(case.make(torch.Generator().manual_seed(7), dtype))
    expected = answer(case, dict(Ops())[case.op], {k: moved(v, "cpu", wide=True) for k, v in arguments.items()})[0]
    device = "cpu" if INTERPRETED else "cuda"
    given = {name: moved(value, device) for name, value in arguments.items()}
    found = getattr(linear, case.op.split(".")[1])(**given)
    scale = max(expected.abs().max().item() if expected.numel() else 1.0, 1e-6)
    torch.testing.assert_close(
        found.cpu().double(), expected.double(), rtol=0.0, atol=case.tolerances[dtype] * scale, equal_nan=True
    )


@pytest.mark.parametrize("op", ["int8", "int4", "int4_wide", "fp8"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_no_number_breaks_its_row_alone(op: str, broken: float) -> None:
    from localllm.kernels.triton import linear

    case = next(case for case in CASES if case.op == f"linear.{op}" and str(case).endswith("33-rows"))
    device, dtype = ("cpu", torch.float32) if INTERPRETED else ("cuda", torch.bfloat16)
    given = {k: moved(v, device) for k, v in case.make(torch.Generator().manual_seed(7), dtype).items()}
    given["x"][5, 3] = broken
    found = getattr(linear, op)(**given).isfinite()
    assert not found[5].any()
    assert found[:5].all()
    assert found[6:].all()


def test_rounding_is_exactly_that_of_the_reference() -> None:
    """Ties too, in whatever a compiler makes of the additions that round."""
    from localllm.kernels.ops.linear_int8 import rounded
    from localllm.kernels.triton.round_rows import as_rounded, round_rows

    x = torch.randn(32, 2500, generator=torch.Generator().manual_seed(3))
    x[3], x[5] = 0.0, torch.arange(2500) * 0.5
    x[7, :254], x[7, 254:] = torch.arange(-127, 127) + 0.5, 127.0
    whole, scale = rounded(x)
    given = x if INTERPRETED else x.cuda()
    for found, right in zip(round_rows(given), (whole, scale[:, 0]), strict=True):
        assert torch.equal(found.cpu().float(), right)
    for group in (32, 128):
        padded = torch.nn.functional.pad(x, (0, -2500 % group)).unflatten(-1, (-1, group))
        whole, scale = rounded(padded)
        assert torch.equal(as_rounded(given, group).cpu(), (whole * scale).flatten(-2)[:, :2500])
