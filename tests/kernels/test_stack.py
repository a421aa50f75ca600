"""All layers of a step in one op on the CPU: stacks whose layers differ in all properties have the same bits as single
layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.backends.cpu import device as cpu
from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases.layer import inputs
from localllm.kernels.ops.cases.moe import random_experts, random_weight
from localllm.kernels.ops.cases.reference_check import copy_to, pack_value
from localllm.kernels.ops.layer import DecoderLayer
from localllm.kernels.ops.mlp import Experts, GatedMlp
from localllm.kernels.ops.moe import Routing
from localllm.kernels.ops.projection import Product
from localllm.kernels.ops.step import Cache, LayerStep, Places

pytestmark = [pytest.mark.real, pytest.mark.skipif(bool(cpu.MISSING), reason=cpu.MISSING or "")]

FORMATS = ("dense", "int8", "fp8", "mxfp4")
GATES = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")
ROTARY_DIMS = (32, 16)
HIDDEN = 64
PANELS: dict[str, Any] = {"hidden": HIDDEN, "inner": 32}
LABELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"experts": 6, "shared": False, **PANELS},
    "shared expert": {"experts": 6, **PANELS},
    "norm after experts": {"experts": 6, "shared": False, "after_norms": True, **PANELS},
    "experts without panels": {"experts": 6, "shared": False},
}


class Stacks:
    """Random layers, and a step for them."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = self.draw.choice([torch.float32, torch.bfloat16])
        lens = self.draw.choice([[(1, 9)], [(1, 9), (1, 1), (1, 16)], [(5, 5), (1, 12), (3, 12)]])
        given = inputs(lens, hidden=HIDDEN, layers=1)(self.generator, self.dtype)
        self.x, self.stream = given["x"], given["stream"]
        order = self.draw.sample(range(3), 3)  # of the pages
        pages: list[tuple[Tensor, Tensor]] = [()] * 3  # type: ignore[list-item]
        self.layers = []
        for index in order:
            kv_heads, dim = self.draw.choice([(2, 32), (4, 32), (1, 64)])
            shape = *given["step"].cache.keys.shape[1:3], kv_heads, dim
            pages[index] = self.random(*shape), self.random(*shape)
            self.layers.append(self.layer(index, kv_heads, dim))
        angles = [50.0 * torch.rand(len(self.x), dim // 2, generator=self.generator) for dim in ROTARY_DIMS]
        rotations = [(angle.cos(), angle.sin()) for angle in angles]
        keys, values = zip(*pages, strict=True)
        self.step: LayerStep = given["step"]._replace(cache=Cache(keys, values), rotations=rotations)

    def layer(self, cache_index: int, kv_heads: int, dim: int) -> DecoderLayer:
        has_experts = self.draw.random() < 0.6
        has_norms = not has_experts and self.draw.random() < 0.5
        int4 = self.draw.choice(["int4", "int4_wide"])  # a layer has one kind
        after = [self.norm(HIDDEN) if has_norms else None for _ in range(2)]
        head_norms = [self.norm(dim) if self.draw.random() < 0.5 else None] * 2
        return DecoderLayer(
            self.norm(HIDDEN),
            self.norm(HIDDEN),
            *after,
            *head_norms,
            self.product(int4, HIDDEN, (4 + 2 * kv_heads) * dim),
            self.product(int4, 4 * dim, HIDDEN),
            self.experts() if has_experts else self.mlp(int4),
            self.draw.choice(["neox", "interleaved"]),
            dim,
            self.draw.choice([1e-6, 1e-3]),
            self.draw.choice([0.0, 1.0]),
            dim**-0.5,
            window=self.draw.choice([0, 3, 7]),
            soft_cap=self.draw.choice([0.0, 2.0]),
            sinks=torch.randn(4, generator=self.generator) if self.draw.random() < 0.5 else None,
            cache_index=cache_index,
            rotation_index=self.draw.randint(0, 1),
        )

    def mlp(self, int4: str) -> GatedMlp:
        products = self.product(int4, HIDDEN, 192), self.product(int4, 96, HIDDEN)
        return GatedMlp(*products, self.draw.choice(GATES))  # type: ignore[arg-type]

    def experts(self) -> Experts:
        count, groups = self.draw.choice([(8, 1), (8, 4), (12, 2)])
        op = self.draw.choice([*FORMATS, "int4", "int4_wide"])
        gate: Any = self.draw.choice([*GATES, "clamped_swiglu_and_mul"])
        has_bias = self.draw.random() < 0.5
        weights = random_experts(op, count, HIDDEN, 64, self.generator, self.dtype, gate=gate, bias=has_bias, group=64)
        down = random_weight(op, count * HIDDEN, 64, self.generator, self.dtype, group=32)
        chosen = self.draw.randint(1, 2), self.draw.choice(["softmax", "sigmoid"]), self.draw.random() < 0.5
        routing = Routing(*chosen, 2.5, groups, 1, self.draw.choice(["max", "top2"]))  # type: ignore[arg-type]
        has_correction = self.draw.random() < 0.5
        correction = torch.randn(count, generator=self.generator) if has_correction else None
        router = Product("dense", random_weight("dense", count, HIDDEN, self.generator, self.dtype), self.bias(count))
        return Experts(router, routing, correction, weights._replace(down=down))

    def product(self, int4: str, in_features: int, outputs: int) -> Product:
        op = self.draw.choice([*FORMATS, int4, int4])
        weight = random_weight(op, outputs, in_features, self.generator, self.dtype)
        return Product(op, weight, self.bias(outputs))

    def bias(self, outputs: int) -> Tensor | None:
        return 0.1 * torch.randn(outputs, generator=self.generator) if self.draw.random() < 0.5 else None

    def norm(self, width: int) -> Tensor:
        return 1.0 + 0.1 * self.random(width)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)


def results(decoders: Callable[..., Any], stack: Any, x: Tensor, stream: Tensor, step: LayerStep) -> list[Tensor]:
    """The outputs and the pages after the step."""
    x, stream, step = (copy_to(value, "cpu") for value in (x, stream, step))
    return [*decoders(cpu.OPS, stack, x, stream, step), *step.cache.keys, *step.cache.values]


def assert_same_bits(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    assert all(torch.equal(result, reference) for result, reference in zip(one, other, strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_all_layers_in_one_op_have_the_bits_of_single_layers(seed: int) -> None:
    given = Stacks(seed)
    stack = pack_value(cpu.OPS, tuple(given.layers), given.dtype)
    assert stack.arguments is not None
    inputs = given.x, given.stream, given.step
    found = results(cpu.OPS.layer.decoders, stack, *inputs)
    assert all(result.isfinite().all() for result in found)
    assert_same_bits(found, results(Ops().layer.decoders, stack.layers, *inputs))
    apart = [layer._replace(experts=None) for layer in stack.layers]  # the router is an op of its own
    assert_same_bits(found, results(Ops().layer.decoders, apart, *inputs))


@pytest.mark.parametrize("seed", range(4))
def test_layers_of_two_cache_groups_have_the_bits_of_single_layers(seed: int) -> None:
    """The second layer has other pages for the same positions."""
    given = Stacks(seed)
    stack = pack_value(cpu.OPS, tuple(given.layers), given.dtype)
    step = given.step
    pages, page_size = step.cache.keys[0].shape[:2]
    moved = torch.randperm(pages, generator=given.generator)
    rows = replace(step.rows, page_table=moved[step.rows.page_table.long()].int(), group=1)
    slots = moved[step.slots // page_size] * page_size + step.slots % page_size
    step = step._replace(cache=replace(step.cache, groups=(0, 1, 0)), other_places=(Places(rows, slots),))
    found = results(cpu.OPS.layer.decoders, stack, given.x, given.stream, step)
    assert_same_bits(found, results(Ops().layer.decoders, stack.layers, given.x, given.stream, step))
    one_group = results(cpu.OPS.layer.decoders, stack, given.x, given.stream, given.step)
    assert not torch.equal(found[0], one_group[0])


@pytest.mark.parametrize("label", LABELS)
def test_stacks_that_one_op_supports(label: str) -> None:
    given = inputs([(1, 9), (3, 12)], layers=2, **LABELS[label])(torch.Generator().manual_seed(5), torch.float32)
    stack = pack_value(cpu.OPS, given["stack"], torch.float32)
    assert (stack.arguments is not None) == (label in ("dense", "experts"))
    arguments = given["x"], given["stream"], given["step"]
    found = results(cpu.OPS.layer.decoders, stack, *arguments)
    assert_same_bits(found, results(Ops().layer.decoders, stack.layers, *arguments))


def test_other_steps_are_computed_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.kernels.cpu.step import stack as module

    monkeypatch.setattr(module, "_layers", lambda *_: pytest.fail("all layers in one op"))
    lens = [(1, 9), (3, 12)]
    for changed in ({"last": (0, 1)}, {"adapted": True}):
        given = inputs(lens, layers=2, **changed)(torch.Generator().manual_seed(5), torch.float32)
        stack = pack_value(cpu.OPS, given["stack"], torch.float32)
        cpu.OPS.layer.decoders(cpu.OPS, stack, given["x"], given["stream"], given["step"])


def test_tensors_and_reals_that_no_layer_reads_are_refused() -> None:
    given = inputs([(1, 9)], layers=2)(torch.Generator().manual_seed(5), torch.float32)
    stack = pack_value(cpu.OPS, given["stack"], torch.float32)
    arguments = stack.arguments
    longer = (
        arguments._replace(tensors=[*arguments.tensors, torch.zeros(1)]),
        arguments._replace(reals=torch.cat([arguments.reals, torch.zeros(1, dtype=torch.float64)])),
    )
    for each in longer:
        with pytest.raises(RuntimeError, match="layers: tensors or reals is too long"):
            results(cpu.OPS.layer.decoders, replace(stack, arguments=each), given["x"], given["stream"], given["step"])
