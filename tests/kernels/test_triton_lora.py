"""The Triton LoRA products against the reference: on a GPU, or in the interpreter (test_triton_interpreted.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases import CASES
from localllm.kernels.ops.cases.case import Case
from localllm.kernels.ops.cases.lora import random_adapters, random_weights
from localllm.kernels.ops.cases.reference_check import call_op, copy_to

from ..accelerator import INTERPRETED, triton_device

pytest.importorskip("triton")
DEVICE = triton_device()

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not DEVICE, reason="there is no GPU"),
]
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """torch.empty returns NaN and the largest integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.op in ("lora.add", "lora.embedding")], ids=str)
def test_product_equals_reference(case: Case, dtype: torch.dtype) -> None:
    from localllm.kernels.triton import lora

    arguments = dict(case.make(torch.Generator().manual_seed(7), dtype))
    wide = {name: copy_to(value, "cpu", wide=True) for name, value in arguments.items()}
    expected = call_op(case, dict(Ops())[case.op], wide)[0]
    implementation = getattr(lora, case.op.removeprefix("lora."))
    actual = call_op(case, implementation, {name: copy_to(value, DEVICE) for name, value in arguments.items()})[0]
    limit = case.tolerances[dtype] * expected.abs().max().item()
    torch.testing.assert_close(actual.cpu().double(), expected.double(), rtol=0.0, atol=limit)


def test_projection_of_the_triton_ops() -> None:
    """The ops of a device with Triton add the LoRA product to a projection."""
    from localllm.kernels.triton.ops import with_triton

    (case,) = (case for case in CASES if str(case) == "lora.project-mixed")
    arguments = dict(case.make(torch.Generator().manual_seed(7), torch.float32))
    wide = {name: copy_to(value, "cpu", wide=True) for name, value in arguments.items()}
    expected = call_op(case, Ops().lora.project, wide)[0]
    ops = Ops(lora=with_triton(Ops()).lora)
    on_device = {name: copy_to(value, DEVICE) for name, value in arguments.items()} | {"ops": ops}
    actual = call_op(case, ops.lora.project, on_device)[0]
    limit = case.tolerances[torch.float32] * expected.abs().max().item()
    torch.testing.assert_close(actual.cpu().double(), expected.double(), rtol=0.0, atol=limit)


class Launches:
    """A kernel that counts its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.count = 0

    def __getitem__(self, grid: Any) -> Any:
        self.count += 1
        return self.kernel[grid]


@pytest.mark.parametrize("op", ["add", "embedding"])
def test_each_product_has_two_launches(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number is the same for one adapter or eight, in decode and in prefill."""
    from localllm.kernels.triton import lora

    kernels = [Launches(getattr(lora, name)) for name in ("shrink", "lookup", "expand")]
    for kernel, name in zip(kernels, ("shrink", "lookup", "expand"), strict=True):
        monkeypatch.setattr(lora, name, kernel)
    generator = torch.Generator().manual_seed(1)
    weights = random_weights((0, *[8] * 8), 50, (48,), generator, torch.float32)
    for tokens in (1, 20):
        for slots in ([1] * 8, range(1, 9)):
            adapters = random_adapters([(tokens, slot) for slot in slots], generator)
            inputs = torch.randn(8 * tokens, 50) if op == "add" else torch.arange(8 * tokens, dtype=torch.int32) % 50
            arguments = (torch.zeros(8 * tokens, 48), inputs, weights, adapters)
            for kernel in kernels:
                kernel.count = 0
            getattr(lora, op)(*(copy_to(argument, DEVICE) for argument in arguments))
            assert [kernel.count for kernel in kernels] == ([1, 0, 1] if op == "add" else [0, 1, 1])
