"""LoRA products of the CPU: refused arguments, adapters without factors for a module, and the fused layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from localllm.backends.cpu import device as cpu
from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases import CASES
from localllm.kernels.ops.cases.lora import random_adapters, random_weights
from localllm.kernels.ops.cases.reference_check import copy_to, device_arguments

pytestmark = [pytest.mark.real, pytest.mark.skipif(bool(cpu.MISSING), reason=cpu.MISSING or "")]

ROWS = [(5, 2), (1, 1), (3, 0), (1, 2)]
TOKENS = 10


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def op_arguments() -> dict[str, Any]:
    """Valid arguments of the op lora_add."""
    weights = random_weights((0, 4, 8), 32, (16, 8), generator(), torch.float32)
    adapters = random_adapters(ROWS, generator())
    assert adapters.tiles is not None
    return {
        "out": torch.zeros(TOKENS, 24),
        "x": torch.ones(TOKENS, 32),
        "lora_a": weights.a,
        "lora_b": weights.b,
        "widths": [16, 8],
        "scales": adapters.scales,
        "order": adapters.tiles.order,
        "starts": adapters.tiles.starts,
        "tile_slots": adapters.tiles.slots,
    }


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


REFUSED = {
    "widths is another sum": ({"widths": [16, 9]}, "lora_b has shape .* expected"),
    "too many slices": ({"widths": [6, 6, 6, 6]}, "the number of slices is 4, 1 to 3 expected"),
    "slices without factors": ({"widths": [24]}, "lora_a has shape .* expected"),
    "a token behind the last": ({"order": ints(*range(1, TOKENS + 1))}, r"order\[9\] is 10, 0 to 9 expected"),
    "a slot behind the last": ({"tile_slots": ints(1, 3)}, r"tile_slots\[1\] is 3, 0 to 2 expected"),
    "too few starts": ({"starts": ints(0, 7)}, "starts has shape"),
    "starts that go down": ({"starts": ints(4, 1, 7)}, "starts goes down after tile 0"),
    "x of another type": ({"x": torch.ones(TOKENS, 32).half()}, "x and lora_a are of different types"),
    "x of another width": ({"x": torch.ones(TOKENS, 33)}, "x has shape"),
    "scales of other tokens": ({"scales": torch.ones(TOKENS + 1)}, "scales has shape"),
}


@pytest.mark.parametrize(("changed", "message"), REFUSED.values(), ids=REFUSED)
def test_lora_add_refuses_wrong_arguments(changed: dict[str, Any], message: str) -> None:
    torch.ops.localllm.lora_add(**op_arguments())
    with pytest.raises(RuntimeError, match=message):
        torch.ops.localllm.lora_add(**{**op_arguments(), **changed})


def test_lora_embedding_refuses_a_token_outside_the_vocabulary() -> None:
    arguments = op_arguments()
    arguments["tokens"] = torch.full((TOKENS,), 32, dtype=torch.int32)
    weights = random_weights((0, 4, 8), 32, (24,), generator(), torch.float32)
    arguments.update(lora_a=weights.a, lora_b=weights.b, widths=[24])
    del arguments["x"]
    with pytest.raises(RuntimeError, match=r"tokens\[0\] is 32, 0 to 31 expected"):
        torch.ops.localllm.lora_embedding(**arguments)


@pytest.mark.parametrize("difference", ["four slices", "columns with a stride", "no tiles"])
def test_arguments_without_a_kernel_use_the_reference(difference: str) -> None:
    widths = (4, 4, 4, 4) if difference == "four slices" else (16,)
    weights = random_weights((0, 4, 8), 32, widths, generator(), torch.float32)
    adapters = random_adapters(ROWS, generator())
    if difference == "no tiles":
        adapters = adapters._replace(tiles=None)
    x = torch.randn(TOKENS, 32, generator=generator())
    if difference == "columns with a stride":
        x = x.T.contiguous().T
    actual = torch.zeros(TOKENS, 16)
    expected = torch.zeros(TOKENS, 16)
    cpu.OPS.lora.add(actual, x, weights, adapters)
    Ops().lora.add(expected, x, weights, adapters)
    torch.testing.assert_close(actual, expected)


def test_an_adapter_without_factors_for_a_module_changes_no_bit() -> None:
    weights = random_weights((0, 4, 8), 32, (16, 8), generator(), torch.bfloat16)
    weights.a.zero_()
    weights.b.fill_(torch.nan)  # the kernel does not read them
    out = torch.randn(TOKENS, 24, generator=generator()).bfloat16()
    before = out.clone()
    cpu.OPS.lora.add(out, torch.ones(TOKENS, 32).bfloat16(), weights, random_adapters(ROWS, generator()))
    assert torch.equal(out, before)


def test_a_layer_with_adapters_is_one_op() -> None:
    (case,) = (case for case in CASES if str(case) == "layer.decoder-adapters")
    arguments = dict(case.make(generator(), torch.float32))
    ops = cpu.OPS

    def fail(*_: Any) -> Any:
        raise AssertionError("composed")

    given = device_arguments(case, ops, arguments, "cpu", torch.float32)
    composed = device_arguments(case, replace(ops, layer=Ops().layer), arguments, "cpu", torch.float32)
    given["ops"] = replace(ops, attention=replace(ops.attention, paged=fail))
    actual = ops.layer.decoder(**given)
    expected = Ops().layer.decoder(**copy_to(composed, "cpu"))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-5, atol=5e-4)
