"""Decoder layers with experts and fused norms against their unfused parts, and the products of few choices against the
reference, on a CUDA device."""

from __future__ import annotations

import random
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases import CASES
from localllm.kernels.ops.cases.case import Case
from localllm.kernels.ops.cases.layer import inputs
from localllm.kernels.ops.cases.moe import random_experts, random_weight
from localllm.kernels.ops.cases.reference_check import (
    call_op,
    copy_to,
    device_arguments,
    mismatch,
    pack_value,
    reference_run,
)
from localllm.kernels.ops.layer import decoder
from localllm.kernels.ops.moe import ExpertGate, Routed, Routing, experts, route

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
FEW_FORMATS = ("int8", "int4", "int4_wide", "fp8", "mxfp4")
GATES = get_args(ExpertGate)
CLEAR = [case for case in CASES if case.op == "layer.decoder" and "clear-experts" in str(case)]
WIDE: dict[str, Any] = {"heads": 8, "kv_heads": 2, "dim": 64, "hidden": 512, "inner": 192, "page_size": 16}


@pytest.mark.parametrize("experts", [6, 128])
@pytest.mark.parametrize("rows", [1, 3, 8])
@torch.inference_mode()
def test_fused_layer_equals_its_parts(rows: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.backends.cuda.ops import MISSING, OPS

    if MISSING:
        pytest.skip(MISSING)
    from localllm.kernels.cuda.step import layer

    fused = []
    norm_route = layer.norm_route
    monkeypatch.setattr(layer, "norm_route", lambda *given: fused.append(norm_route(*given)) or fused[-1])
    make = inputs([(1, 9 + row) for row in range(rows)], experts=experts, **WIDE)
    given = dict(make(torch.Generator().manual_seed(4), torch.bfloat16))
    given["layer"] = pack_value(OPS, copy_to(given["layer"], "cuda"), torch.bfloat16)
    given["ops"] = OPS

    def computed(decode: Any) -> tuple[Tensor, Tensor]:
        there = {name: copy_to(given[name], "cuda") for name in ("x", "stream", "step")}
        x, stream = decode(**given | there)
        return x.float(), stream.float()

    for one, other in zip(computed(layer.decoder), computed(decoder), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=4e-2 * other.abs().max().item())
    assert len(fused) == 1
    assert fused[0] is not None


@pytest.mark.parametrize("case", CLEAR, ids=map(str, CLEAR))
def test_layers_equal_the_reference(case: Case) -> None:
    from localllm.backends.cuda.ops import OPS

    arguments, expected = reference_run(case, Ops().layer.decoder, torch.bfloat16)
    there = device_arguments(case, OPS, arguments, "cuda", torch.bfloat16)
    assert not mismatch(call_op(case, OPS.layer.decoder, there), expected, case.tolerances[torch.bfloat16])


@pytest.mark.parametrize("op", FEW_FORMATS)
def test_random_products_of_choices(op: str) -> None:
    """50 products with several rows, choices and experts, and any supported outputs and inputs; some have a gate or a
    bias. A second call has the same bits."""
    from localllm.backends.cuda.ops import OPS
    from localllm.kernels.cuda.moe import experts as moe

    draw, generator = random.Random(op), torch.Generator().manual_seed(6)
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    for _ in range(50):
        rows, per_row, count = draw.randint(1, 5), draw.randint(1, 8), draw.randint(1, 12)
        outputs, in_features = 8 * draw.randint(1, 50), 8 * draw.choice([1, 3, 4, 17, 96, 256, 300, 700, 1200])
        if op == "mxfp4":
            in_features += -in_features % 32
        groups = [64, 128, 256, in_features] if op == "fp8" else [32, 64, 128]
        group, gate = draw.choice(groups), draw.choice([None, *GATES])
        width = outputs * (1 if gate is None else 2)
        weight = random_weight(op, count * width, in_features, generator, torch.bfloat16, group)
        bias = torch.randn(count, width, generator=generator) if draw.random() < 0.3 else None
        size = 20.0 if gate == "clamped_swiglu_and_mul" else 1.0  # products exceed the limits
        x = (torch.randn(rows, in_features, generator=generator) * size).bfloat16()
        chosen = torch.randint(0, count, (rows, per_row), generator=generator).int()
        every = getattr(Ops().linear, op)(x.double(), copy_to(weight, "cpu", wide=True), None, torch.float64)
        expected = every.unflatten(1, (count, width)).gather(1, chosen.long()[..., None].expand(-1, -1, width))
        if bias is not None:
            expected += bias[chosen.long()]
        if gate is not None:
            expected = getattr(Ops().activation, gate)(expected.bfloat16().double())
        packed = OPS.moe.pack_slices([copy_to(weight, "cuda")], count, width, torch.bfloat16)
        assert moe.is_few_format(packed)
        routed = Routed(chosen.cuda(), torch.empty(0))
        arguments = x.cuda(), routed, op, packed, None if bias is None else bias.cuda()
        out, again = (torch.empty(rows * per_row, outputs, device="cuda") for _ in range(2))
        for each in (out, again):
            moe.choice_products(each, *arguments, -1 if gate is None else GATES.index(gate))
        assert torch.equal(out, again)
        allowed = (6e-3 if gate is None else 3e-2) * max(expected.abs().max().item(), 1e-6)
        torch.testing.assert_close(out.cpu().double(), expected.flatten(0, 1), rtol=0.0, atol=allowed)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("gate", ["silu_and_mul", "gelu_tanh_and_mul", "clamped_swiglu_and_mul"])
@pytest.mark.parametrize(
    ("op", "group"), [*((op, 64) for op in FEW_FORMATS), ("int4", 32), ("int4_wide", 128), ("fp8", 264)]
)
@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_experts_of_few_tokens_equal_reference(
    tokens: int, op: str, group: int, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localllm.backends.cuda.ops import OPS
    from localllm.kernels.cuda.moe import experts as moe

    few, calls = moe.few, []
    monkeypatch.setattr(moe, "few", lambda *given: calls.append(1) or few(*given))
    generator = torch.Generator().manual_seed(8)
    hidden, inner = (288, 160) if op == "mxfp4" else (264, 136)
    weights = random_experts(op, 16, hidden, inner, generator, torch.bfloat16, gate=gate, bias=tokens == 3, group=group)
    logits = torch.randn(tokens, 16, generator=generator)
    routed = route(logits, Routing(8, "softmax", True))
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    expected = experts(x.double(), routed, copy_to(weights, "cpu", wide=True))
    packed = pack_value(OPS, copy_to(weights, "cuda"), torch.bfloat16)
    there = Routed(*(each.cuda() for each in routed))
    actual, again = (OPS.moe.experts(x.cuda(), there, packed) for _ in range(2))
    allowed = 2e-2 * expected.abs().max().item()
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=0.0, atol=allowed)
    assert torch.equal(actual, again)
    assert len(calls) == 2


def test_mxfp4_experts_of_the_size_of_gpt_oss() -> None:
    """Rows of 2880 inputs end within a chunk of 128."""
    from localllm.backends.cuda.ops import OPS

    generator = torch.Generator().manual_seed(9)
    gate: Any = "clamped_swiglu_and_mul"
    weights = random_experts("mxfp4", 5, 2880, 2880, generator, torch.bfloat16, gate=gate, bias=True)
    routed = route(torch.randn(2, 5, generator=generator), Routing(4, "softmax", True))
    x = torch.randn(2, 2880, generator=generator).bfloat16()
    expected = experts(x.double(), routed, copy_to(weights, "cpu", wide=True))
    packed = pack_value(OPS, copy_to(weights, "cuda"), torch.bfloat16)
    actual = OPS.moe.experts(x.cuda(), Routed(*(each.cuda() for each in routed)), packed)
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=0.0, atol=2e-2 * expected.abs().max().item())


@pytest.mark.parametrize("op", FEW_FORMATS)
def test_a_nan_stays_in_its_row(op: str) -> None:
    from localllm.backends.cuda.ops import OPS
    from localllm.kernels.cuda.moe import experts as moe

    generator = torch.Generator().manual_seed(10)
    weight = random_weight(op, 3 * 16, 288, generator, torch.bfloat16, 64 if op == "fp8" else 32)
    packed = OPS.moe.pack_slices([copy_to(weight, "cuda")], 3, 16, torch.bfloat16)
    x = torch.randn(3, 288, generator=generator).bfloat16().cuda()
    x[1, 70] = torch.nan
    out = torch.zeros(6, 16, device="cuda")
    chosen = torch.tensor([[0, 1], [1, 2], [2, 0]], device="cuda", dtype=torch.int32)
    moe.choice_products(out, x, Routed(chosen, torch.empty(0)), op, packed, None)
    found = out.isnan()
    assert found[2:4].all()
    assert not found[[0, 1, 4, 5]].any()


def test_choice_products_refuse_mxfp4_that_is_not_plain() -> None:
    from localllm.backends.cuda.ops import MISSING

    if MISSING:
        pytest.skip(MISSING)
    x = torch.zeros(1, 64, device="cuda", dtype=torch.bfloat16)
    chosen = torch.zeros(1, device="cuda", dtype=torch.int32)
    data, exponents = (torch.zeros(16, size, device="cuda", dtype=torch.uint8) for size in (32, 2))

    def call(exponents: Tensor = exponents, format: int = 5, group: int = 32, gate: int = -1) -> None:
        out = torch.empty(1, 16 if gate < 0 else 8, device="cuda")
        torch.ops.localllm.choice_products(out, x, chosen, data, exponents, None, None, format, group, gate, False)

    call()
    call(gate=3)
    for message, changed in (
        ("records has shape", {"exponents": exponents[:, :1].contiguous()}),
        ("records", {"exponents": exponents.int()}),
        ("groups of 64 inputs, 32 expected", {"group": 64}),
        ("format is 6, 0 to 5 expected", {"format": 6}),
        ("gate is 4, -1 to 3 expected", {"gate": 4}),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(**changed)


def test_choice_products_refuse_shapes_that_do_not_fit() -> None:
    from localllm.backends.cuda.ops import MISSING, OPS

    if MISSING:
        pytest.skip(MISSING)
    generator = torch.Generator().manual_seed(8)
    weight = random_weight("int8", 4 * 16, 64, generator, torch.bfloat16, 32)
    packed = OPS.moe.pack_slices([copy_to(weight, "cuda")], 4, 16, torch.bfloat16)
    x = torch.zeros(2, 64, device="cuda", dtype=torch.bfloat16)

    def call(choices: int, outputs: int, experts: torch.Tensor | None = None, x: torch.Tensor = x) -> None:
        chosen = torch.zeros(choices, device="cuda", dtype=torch.int32) if experts is None else experts
        out = torch.empty(choices, outputs, device="cuda")
        held = packed.data, None, packed.scale, None, packed.format, packed.group
        torch.ops.localllm.choice_products(out, x, chosen, *held, -1, False)

    call(4, 16)
    call(0, 16)
    for refused, given in (
        ("choice_products: 3 choices of 2 rows", (3, 16)),
        ("choice_products: weight has 64 outputs, a multiple of 24 expected", (4, 24)),
        ("choice_products: experts has shape", (4, 16, torch.zeros(3, device="cuda", dtype=torch.int32))),
        ("experts", (4, 16, torch.zeros(4, device="cuda", dtype=torch.int64))),
        (
            "choice_products: a row of weight has 64 bytes",
            (4, 16, None, torch.zeros(2, 72, device="cuda", dtype=torch.bfloat16)),
        ),
    ):
        with pytest.raises(RuntimeError, match=refused):
            call(*given)
