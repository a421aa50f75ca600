"""Layers with adapters, other MLPs and pages of different shapes, and the fused kernels that compute them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from localllm.backends.cpu import device as cpu
from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases.layer import inputs
from localllm.kernels.ops.cases.reference_check import copy_to, pack_value
from localllm.kernels.ops.mlp import GatedMlp
from localllm.kernels.ops.projection import Product
from localllm.kernels.ops.step import Adapters, Cache, LayerStep

LENS = [(1, 9), (5, 5), (3, 12)]
TOKENS = 9
NEAR = 5e-5
PLACES = pytest.mark.parametrize(
    "ops",
    [
        Ops(),
        pytest.param(cpu.OPS, marks=pytest.mark.skipif(bool(cpu.MISSING), reason=cpu.MISSING or "")),
    ],
    ids=["reference", "cpu"],
)


class Adapted(NamedTuple):
    """A projection to which adapter n adds n times the sum of the inputs, times the scale."""

    base: Product

    @property
    def product(self) -> Product:
        return self.base

    def __call__(self, x: Tensor, ops: Ops, step: LayerStep | None = None, dtype: torch.dtype | None = None) -> Tensor:
        result = self.base(x, ops, step, dtype)
        if step is None or step.adapters is None:
            return result
        assert len(step.adapters.slots) == len(x), "the adapters of other tokens"
        factors = step.adapters.slots * step.adapters.scales
        return result + factors.unsqueeze(1) * x.sum(1, keepdim=True)


class TwoExperts(NamedTuple):
    """The mean of two MLPs."""

    one: GatedMlp
    other: GatedMlp

    def __call__(self, x: Tensor, ops: Ops, step: LayerStep) -> Tensor:
        return (self.one(x.clone(), ops, step) + self.other(x, ops, step)) / 2


def arguments(**more: Any) -> dict[str, Any]:
    return dict(inputs(LENS, **more)(torch.Generator().manual_seed(7), torch.float32))


def packed(ops: Ops, layer: Any) -> Any:
    """The layer with packed weights, not yet prepared."""
    return pack_value(replace(ops, layer=Ops().layer), layer, torch.float32)


def adapted(layer: Any) -> Any:
    mlp = GatedMlp(Adapted(layer.mlp.gate_up), Adapted(layer.mlp.down), layer.mlp.gate)
    return replace(layer, qkv=Adapted(layer.qkv), out=Adapted(layer.out), mlp=mlp)


def fused(ops: Ops) -> Ops:
    """Ops that fail if the ops of a fused layer are called separately."""

    def never(*_: Any) -> Any:
        raise AssertionError("composed")

    return replace(ops, attention=replace(ops.attention, paged=never))


def decoded(ops: Ops, layer: Any, given: dict[str, Any]) -> list[Tensor]:
    there = {name: copy_to(given[name], "cpu") for name in ("x", "stream", "step")}
    x, stream = ops.layer.decoder(ops, layer, **there)
    return [x, stream, there["step"].cache.keys, there["step"].cache.values]


def near(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=NEAR, atol=NEAR * max(other.abs().max().item(), 1.0))


@PLACES
@pytest.mark.parametrize("last", [None, (0, 2)])
def test_each_token_uses_its_adapter(ops: Ops, last: tuple[int, ...] | None) -> None:
    given = arguments(last=last)
    layer = adapted(packed(ops, given["layer"]))
    plain = adapted(given["layer"])
    slots = torch.arange(TOKENS).int() % 3
    given["step"] = given["step"]._replace(adapters=Adapters(slots, torch.linspace(0.5, 1.0, TOKENS), (1,)))
    expected = decoded(Ops(), plain, given)
    near(decoded(ops, ops.layer.prepare(layer), given), expected)
    without = decoded(Ops(), plain, {**given, "step": given["step"]._replace(adapters=None)})
    assert not torch.allclose(expected[0], without[0])


@pytest.mark.skipif(bool(cpu.MISSING), reason=cpu.MISSING or "")
def test_a_step_without_adapters_uses_the_fused_kernel() -> None:
    given, ops = arguments(), cpu.OPS
    weights = packed(ops, given["layer"])
    plain, layer = ops.layer.prepare(weights), ops.layer.prepare(adapted(weights))
    for one, other in zip(decoded(fused(ops), layer, given), decoded(ops, plain, given), strict=True):
        assert torch.equal(one, other)
    given["step"] = given["step"]._replace(adapters=Adapters(torch.zeros(TOKENS).int(), torch.ones(TOKENS), (1,)))
    with pytest.raises(AssertionError, match="composed"):
        decoded(fused(ops), layer, given)


@PLACES
def test_an_mlp_can_be_any_callable(ops: Ops) -> None:
    given, other = arguments(), arguments(gate="gelu_and_mul")
    expected = decoded(Ops(), replace(given["layer"], mlp=TwoExperts(given["layer"].mlp, other["layer"].mlp)), given)
    one, two = (packed(ops, each["layer"]) for each in (given, other))
    layer = ops.layer.prepare(replace(one, mlp=TwoExperts(one.mlp, two.mlp)))
    near(decoded(ops, layer, given), expected)


@pytest.mark.skipif(bool(cpu.MISSING), reason=cpu.MISSING or "")
@pytest.mark.parametrize("last", [None, (0, 2)])
def test_one_op_computes_a_layer_up_to_an_mlp_of_any_kind(last: tuple[int, ...] | None) -> None:
    given, other = arguments(last=last), arguments(gate="gelu_and_mul")
    expected = decoded(Ops(), replace(given["layer"], mlp=TwoExperts(given["layer"].mlp, other["layer"].mlp)), given)
    one, two = (packed(cpu.OPS, each["layer"]) for each in (given, other))
    layer = cpu.OPS.layer.prepare(replace(one, mlp=TwoExperts(one.mlp, two.mlp)))
    near(decoded(fused(cpu.OPS), layer, given), expected)


@PLACES
def test_layers_may_have_different_pages_and_rotations(ops: Ops) -> None:
    """One layer with pages of 4 tokens and one with pages of 8. Other tests check each of them alone."""
    parts = [arguments(page_size=size) for size in (4, 8)]
    steps = [part["step"] for part in parts]
    cache = Cache(tuple(step.cache.keys[0] for step in steps), tuple(step.cache.values[0] for step in steps))
    turns = [step.rotations[0] for step in steps]
    for index, part in enumerate(parts):
        expected = decoded(Ops(), part["layer"], part)
        layer = pack_value(ops, replace(part["layer"], cache_index=index, rotation_index=index), torch.float32)
        step = copy_to(part["step"]._replace(cache=cache, rotations=turns), "cpu")
        x, stream = ops.layer.decoder(ops, layer, copy_to(part["x"], "cpu"), copy_to(part["stream"], "cpu"), step)
        pages = [step.cache.keys[index], step.cache.values[index]]
        near([x, stream, *pages], [*expected[:2], *(pages[0] for pages in expected[2:])])
