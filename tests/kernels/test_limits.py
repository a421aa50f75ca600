"""Both sides of every wrapper's limits against the reference: on the CPU, in Triton's interpreter, and on a GPU with
each implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.backends.cpu.device import OPS
from localllm.backends.platforms import platforms
from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases.case import Case
from localllm.kernels.ops.cases.reference_check import call_op, device_arguments, mismatch, reference_run

from ..accelerator import INTERPRETED, accelerator
from .limits import LIMITS, PARAMETERS, sample

PRESENT = accelerator()
# Arguments that may lie apart, as views of something wider.
VIEWS = {"attention.paged": ("query",), "norm.rms": ("x",), "rope.neox": ("query", "key"), "linear.dense": ("x",)}
VIEWS |= {"rope.interleaved": ("query", "key"), "linear.int8": ("x",), "linear.int4": ("x",), "linear.fp8": ("x",)}
VIEWS |= {"linear.int4_wide": ("x",), "activation.silu_and_mul": ("gate_up",), "norm.add_rms": ("x",)}
VIEWS |= {"sampling.greedy": ("logits",), "sampling.draw": ("logits",), "sampling.logprobs": ("logits",)}


def wrong(case: Case, ops: Ops, device: str, dtype: torch.dtype, *, apart: bool = False) -> str:
    arguments, expected = reference_run(case, dict(Ops())[case.op], dtype)
    there = device_arguments(case, ops, arguments, device, dtype)
    if apart:
        there |= {name: lying_apart(there[name]) for name in VIEWS[case.op]}
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    try:
        return mismatch(call_op(case, dict(ops)[case.op], there), expected, case.tolerances[dtype])
    finally:
        torch.use_deterministic_algorithms(False)


def lying_apart(x: Tensor) -> Tensor:
    """The same values with other values before, after and between the rows."""
    wider = x.new_full((*x.shape[:-1], x.shape[-1] + 3), float("nan"))
    wider[..., 1 : 1 + x.shape[-1]] = x
    return wider[..., 1 : 1 + x.shape[-1]]


@pytest.mark.real
@pytest.mark.skipif(INTERPRETED, reason="the CPU's own kernels need no interpreter")
@pytest.mark.parametrize("case", PARAMETERS, ids=str)
def test_on_the_cpu(case: Case) -> None:
    for dtype in case.tolerances:
        assert not wrong(case, OPS, "cpu", dtype)


@pytest.mark.emulated
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # numpy's
@pytest.mark.skipif(not INTERPRETED, reason="test_triton_interpreted.py runs it")
@pytest.mark.parametrize("case", sample(2), ids=str)
def test_interpreted(case: Case) -> None:
    from localllm.kernels.triton.ops import with_triton

    ops = with_triton(Ops())
    if ops.title(case.op) == "reference":
        pytest.skip("the reference's")
    assert not wrong(case, ops, "cpu", torch.float32)
    if case.op in VIEWS:
        assert not wrong(case, ops, "cpu", torch.float32, apart=True)


def lanes() -> dict[str, Ops]:
    """The implementations of the accelerator's ops: the library if it is built, Triton, the references."""
    from localllm.kernels.triton.ops import with_triton

    assert PRESENT is not None
    lanes = {"triton": with_triton(Ops()), "references": Ops()}
    ops = platforms()[PRESENT.backend]
    return lanes if ops in lanes.values() else {"library": ops, **lanes}


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.skipif(PRESENT is None or INTERPRETED, reason="there is no GPU")
@pytest.mark.parametrize("case", LIMITS if PRESENT else LIMITS[:1], ids=str)
@pytest.mark.parametrize("lane", ["library", "triton", "references"])
class TestOnGpu:
    def test_dense_equals_reference(self, lane: str, case: Case) -> None:
        self.check(lane, case)

    def test_strided_inputs_of_dense(self, lane: str, case: Case) -> None:
        if case.op not in VIEWS:
            pytest.skip("its arguments are dense")
        dtype = torch.bfloat16 if torch.bfloat16 in case.tolerances else torch.float32
        self.check(lane, case, apart=True, dtypes=[dtype])

    def check(self, lane: str, case: Case, **how: Any) -> None:
        assert PRESENT is not None
        ops = lanes().get(lane) or pytest.skip("the library was not built")
        if ops.title(case.op) == "reference" and lane != "references":
            pytest.skip("the reference's")
        for dtype in how.pop("dtypes", case.tolerances):
            assert not wrong(case, ops, PRESENT.device, dtype, **how), dtype
