"""The Triton kernels of a mixture of experts against the references: on a GPU, or in the interpreter
(test_triton_interpreted.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases import CASES
from localllm.kernels.ops.cases.case import TOLERANCES, Case
from localllm.kernels.ops.cases.moe import random_experts
from localllm.kernels.ops.cases.reference_check import call_op, copy_to, pack_value
from localllm.kernels.ops.linear import Int8
from localllm.kernels.ops.moe import Routed, Routing, experts, route

from ..accelerator import INTERPRETED, triton_device

pytest.importorskip("triton")
DEVICE = triton_device()

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not DEVICE, reason="there is no GPU"),
]
SLOW = [pytest.mark.slow] if INTERPRETED else []
OFTEN = ("-33-tokens", "groups", "correction", "ties", "odd-shape")  # labels of cases that are not slow


def runs() -> Iterator[Any]:
    """(case, dtype of activations). In the interpreter most cases are slow."""
    for case in CASES:
        for dtype in case.tolerances if case.op in ("moe.route", "moe.experts") else ():
            if INTERPRETED and dtype == torch.bfloat16:  # which numpy does not have
                continue
            slow = dtype == torch.float16 or not str(case).endswith(OFTEN)
            yield pytest.param(case, dtype, id=f"{case}-{dtype}", marks=SLOW if slow else [])


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """torch.empty returns NaN and the largest integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def triton_ops() -> Ops:
    from localllm.kernels.triton.ops import with_triton

    return with_triton(Ops())


@pytest.mark.parametrize(("case", "dtype"), list(runs()))
def test_op_equals_reference(case: Case, dtype: torch.dtype) -> None:
    ops = triton_ops()
    arguments = dict(case.make(torch.Generator().manual_seed(7), dtype))
    expected = call_op(case, dict(Ops())[case.op], {k: copy_to(v, "cpu", wide=True) for k, v in arguments.items()})
    on_device = {name: copy_to(value, DEVICE) for name, value in arguments.items()}
    on_device |= {name: pack_value(ops, on_device[name], dtype) for name in case.packs}
    actual = call_op(case, dict(ops)[case.op], on_device)
    for each, reference in zip(actual, expected, strict=True):
        scale = max(reference.abs().max().item() if reference.numel() else 1.0, 1e-6)
        allowed = case.tolerances[dtype] * scale if reference.is_floating_point() else 0.0
        torch.testing.assert_close(each.cpu().double(), reference.double(), rtol=0.0, atol=allowed)


def random_routed(tokens: int, count: int, top_k: int, generator: torch.Generator) -> Routed:
    chosen = torch.rand(tokens, count, generator=generator).argsort(1)[:, :top_k]
    return Routed(chosen.int().contiguous(), torch.rand(tokens, top_k, generator=generator))


def compare(op: str, tokens: int, count: int, top_k: int, hidden: int, inner: int, group: int) -> None:
    """The experts' outputs on the device and those of the reference are equal; two calls give the same bits."""
    ops = triton_ops()
    generator = torch.Generator().manual_seed(3)
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    weights = random_experts(op, count, hidden, inner, generator, dtype, group=group, bias=op == "dense")
    routed = random_routed(tokens, count, top_k, generator)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    expected = experts(x.double(), routed, copy_to(weights, "cpu", wide=True))
    packed = pack_value(ops, copy_to(weights, DEVICE), dtype)
    actual, again = (ops.moe.experts(x.to(DEVICE), copy_to(routed, DEVICE), packed) for _ in range(2))
    rounded = op in ("int8", "int4")
    tolerance = (1e-2 if INTERPRETED else 4e-2) if rounded else 2 * TOLERANCES[dtype]
    allowed = tolerance * expected.abs().max().item()
    torch.testing.assert_close(actual.cpu().double(), expected.double(), rtol=0.0, atol=allowed)
    assert torch.equal(actual, again)


# tokens, experts, top_k, hidden, inner: one tile of each choice; several tiles of an expert, the last one partial.
SIZES = [
    *((100, 3, 2, 64, 96), (260, 2, 2, 32, 32)),
    *(pytest.param(size, marks=SLOW) for size in ((3, 8, 4, 160, 96), (140, 2, 2, 320, 192), (300, 64, 2, 32, 32))),
]


@pytest.mark.parametrize("op", ["dense", "int8", "int4", "int4_wide", "fp8", "mxfp4"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_experts_equal_reference_for_all_tile_sizes(op: str, size: tuple[int, ...], request: Any) -> None:
    if INTERPRETED and op != "dense" and not request.config.getoption("--slow"):
        pytest.skip("slow in the interpreter")
    compare(op, *size, group=32)


@pytest.mark.parametrize(
    "op", ["dense", "int4", "mxfp4", *(pytest.param(op, marks=SLOW) for op in ("int8", "int4_wide", "fp8"))]
)
def test_weights_that_are_dequantised_for_some_experts_at_a_time(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.kernels.triton import moe

    monkeypatch.setattr(moe, "WIDE_ROWS", 16)
    monkeypatch.setattr(moe, "MAX_CHUNK", 3 * 2 * 32 * 64)  # 3 of 7 experts
    compare(op, 40, 7, 2, 64, 32, group=32)


@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize("choices", [1, 63, 64, 65, 513, 1500, 2600])
@pytest.mark.parametrize(("count", "rows"), [(1, 16), (7, 16), (60, 64)])
def test_sorted_choices_are_complete_and_in_tiles_of_one_expert(
    choices: int, count: int, rows: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localllm.kernels.triton import moe_route
    from localllm.kernels.triton.moe_route import sort_choices

    if launches == 2:
        monkeypatch.setattr(moe_route, "ONE_LAUNCH", 0)
    chosen = torch.randint(0, count, (choices, 1), generator=torch.Generator().manual_seed(choices)).int()
    order, tiles = (part.cpu() for part in sort_choices(chosen.to(DEVICE), count, rows))
    assert torch.equal(order.long().sort().values, torch.arange(choices))
    assert torch.equal(chosen[order.long(), 0], chosen[:, 0].sort().values)
    covered = []
    for expert, first, stop in tiles.T.tolist():
        if expert < 0:
            continue
        assert 0 < stop - first <= rows
        assert (chosen[order[first:stop].long(), 0] == expert).all()
        covered += range(first, stop)
    assert sorted(covered) == list(range(choices))


# With up to 256 experts, the kernel compares all pairs; with more, it chooses one expert after the other.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of NaN
@pytest.mark.parametrize("count", [12, 300])
@pytest.mark.parametrize(
    "routing",
    [
        Routing(4, "sigmoid", True),
        Routing(4, "sigmoid", False, 2.5, 3, 2, "top2"),
        Routing(4, "softmax", True, groups=3, top_groups=2),
    ],
    ids=["renormalised", "groups", "softmax"],
)
def test_nan_is_the_best_logit_of_a_router(routing: Routing, count: int) -> None:
    logits = torch.randn(4, count, generator=torch.Generator().manual_seed(5))
    logits[0, 3] = logits[1, [2, 7]] = logits[2] = float("nan")
    expected, actual = route(logits, routing), triton_ops().moe.route(logits.to(DEVICE), routing)
    assert torch.equal(actual.experts.cpu(), expected.experts)
    torch.testing.assert_close(actual.weights.cpu(), expected.weights, equal_nan=True)


def test_groups_of_one_expert_have_its_score() -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(5))
    routing = Routing(2, "sigmoid", True, 1.0, 4, 2, "top2")
    assert torch.equal(triton_ops().moe.route(logits.to(DEVICE), routing).experts.cpu(), route(logits, routing).experts)


def test_both_products_round_their_inputs_in_groups_of_their_own_weights() -> None:
    generator = torch.Generator().manual_seed(3)
    weights = random_experts("int4", 4, 128, 64, generator, torch.float32, group=64)
    down = random_experts("int4", 4, 128, 64, generator, torch.float32, group=32).down
    weights = weights._replace(down=down)
    x, routed = torch.randn(3, 128, generator=generator), random_routed(3, 4, 2, generator)
    ops = triton_ops()
    packed = ops.moe.pack(copy_to(weights, DEVICE), torch.float32)
    actual = ops.moe.experts(x.to(DEVICE), copy_to(routed, DEVICE), packed).cpu()
    torch.testing.assert_close(actual, experts(x, routed, weights), rtol=1e-5, atol=1e-5)


def test_int8_sums_that_may_overflow_are_left_to_the_reference() -> None:
    from localllm.kernels.triton import moe

    for in_features, supported in ((2**17, True), (2**17 + 16, False)):
        data = torch.empty(4, in_features, dtype=torch.int8, device="meta")
        weight = Int8(data, torch.empty(4, device="meta"))
        assert (moe.quantised(weight, torch.float32) is not None) == supported


# The product with a gate, and the one without. The last tile has few rows, the last block some outputs.
@pytest.mark.parametrize("gate", [0, -1])
def test_tiles_of_many_rows_equal_grouped_products(gate: int) -> None:
    from localllm.kernels.triton.moe_product import Blocks, Rows, grouped
    from localllm.kernels.triton.moe_route import sort_choices
    from localllm.kernels.triton.moe_tiles import multiply_tiles
    from localllm.kernels.triton.widen import Quantised

    experts, width, in_features = 3, 72, 64
    blocks = Blocks(32, 32, 32, 4, 2) if INTERPRETED else Blocks(128, 128, 64, 8, 3)
    generator = torch.Generator().manual_seed(5)
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    chosen = torch.tensor([[0, 1], [1, 0], [1, 2]]).repeat(15 if INTERPRETED else 60, 1).int().to(DEVICE)
    outputs = width * (2 if gate >= 0 else 1)
    data = torch.randn(experts * outputs, in_features, generator=generator).to(DEVICE, dtype)
    weight = Quantised("dense", data, data, None, len(data), in_features, in_features)
    plan = sort_choices(chosen, experts, blocks.m)
    rows = Rows(plan.tiles, plan.order, 2)
    x = torch.randn(len(chosen) if gate >= 0 else chosen.numel(), in_features, generator=generator).to(DEVICE, dtype)
    actual, expected = (torch.zeros(chosen.numel(), width, device=DEVICE, dtype=dtype) for _ in range(2))
    for part in (range(2), range(2, experts)):
        some = data[part.start * outputs : part.stop * outputs]
        quantised = Quantised("dense", some, some, None, len(some), in_features, in_features)
        multiply_tiles(actual, x, quantised, rows, blocks, part, x, gate)
    grouped(expected, x, None, weight, None, rows, blocks, experts, x, False, gate)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=2e-2)
    assert expected.abs().min(0).values.max() > 0.0


def test_tiles_of_many_rows_need_aligned_bfloat16_weights() -> None:
    from localllm.kernels.triton.moe_product import Blocks
    from localllm.kernels.triton.moe_tiles import supports_tiles
    from localllm.kernels.triton.widen import Quantised

    def supported(
        in_features: int, out_features: int, dtype: torch.dtype, pad: int = 0, bias: torch.Tensor | None = None
    ) -> bool:
        data = torch.zeros(out_features, in_features + pad, dtype=dtype)[:, :in_features]
        weight = Quantised("dense", data, data, None, out_features, in_features, in_features)
        return supports_tiles(weight, bias, 2, Blocks(128, 32, 64, 4, 2))

    assert supported(64, 64, torch.bfloat16)
    assert not supported(64, 64, torch.bfloat16, pad=4)  # rows of weights are not aligned
    assert not supported(96, 64, torch.bfloat16)  # the last block of inputs is not complete
    assert not supported(64, 48, torch.bfloat16)  # an expert has fewer outputs than a block
    assert not supported(64, 64, torch.float16)
    assert not supported(64, 64, torch.bfloat16, bias=torch.zeros(2, 32))


# The op of the weights, the number of inputs that share a scale, the inputs of down, and the layout of the scales.
ONE_TOKEN = [
    ("dense", 32, 48, "plain"),
    ("dense", 32, 320, "plain"),
    ("fp8", 4096, 48, "plain"),
    ("fp8", 64, 320, "transposed"),
    ("fp8", 256, 48, "plain"),
]


@pytest.mark.parametrize(("op", "group", "inner", "records"), ONE_TOKEN)
@pytest.mark.parametrize("gate", ["silu_and_mul", pytest.param("clamped_swiglu_and_mul", marks=SLOW)])
def test_one_token_equals_reference(gate: Any, op: str, group: int, inner: int, records: str) -> None:
    from localllm.kernels.triton import moe
    from localllm.kernels.triton.moe_one_token import one_token, supports_one_token

    from .cuda_layout import transposed

    def quantised(weight: Any) -> Any:
        if records == "transposed":
            return transposed(weight, DEVICE)
        return moe.quantised(copy_to(weight, DEVICE), dtype)

    generator = torch.Generator().manual_seed(3)
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    weights = random_experts(op, 9, 512, inner, generator, dtype, gate=gate, group=group)
    routed = random_routed(1, 9, 8, generator)
    x = torch.randn(1, 512, generator=generator).to(dtype)
    expected = experts(x.double(), routed, copy_to(weights, "cpu", wide=True))
    gate_up, down = quantised(weights.gate_up), quantised(weights.down)
    assert op == "dense" or gate_up.records == records
    assert INTERPRETED or supports_one_token(routed, gate_up, down, has_bias=False)
    target = moe.device_properties(torch.device(DEVICE)).target
    actual = one_token(x.to(DEVICE), copy_to(routed, DEVICE), gate_up, down, moe.GATES.index(gate), target)
    allowed = 2 * TOLERANCES[dtype] * expected.abs().max().item()
    torch.testing.assert_close(actual.cpu().double(), expected.double(), rtol=0.0, atol=allowed)


def test_one_token_needs_eight_experts_without_bias() -> None:
    from localllm.kernels.triton.moe_one_token import supports_one_token
    from localllm.kernels.triton.widen import Quantised

    def supported(hidden: int, inner: int, dtype: torch.dtype, shape: tuple[int, int] = (1, 8)) -> bool:
        up = torch.empty(18 * inner, hidden, dtype=dtype, device="meta")
        down = torch.empty(9 * hidden, inner, dtype=dtype, device="meta")
        packed = [Quantised("dense", data, data, None, *data.shape, data.shape[1]) for data in (up, down)]
        return supports_one_token(Routed(torch.empty(shape), torch.empty(shape)), *packed, has_bias=False)

    assert supported(2048, 768, torch.bfloat16)
    assert not supported(2048, 768, torch.float16)
    assert not supported(2048, 768, torch.bfloat16, shape=(2, 8))
    assert not supported(2048, 768, torch.bfloat16, shape=(1, 4))
    assert not supported(2048, 2048, torch.bfloat16)  # more inputs of down than a block has
    assert not supported(2304, 768, torch.bfloat16)  # the last block of inputs is not complete
    assert not supported(2048, 764, torch.bfloat16)


ROUTINGS = {
    "softmax": Routing(8, "softmax", True),
    "sigmoid-groups": Routing(4, "sigmoid", False, 2.5, 3, 2, "top2"),
    "many": Routing(2, "softmax", False),
}


@pytest.mark.parametrize(
    ("label", "tokens", "count", "hidden"),
    [("softmax", 1, 128, 256), ("sigmoid-groups", 3, 15, 72), ("many", 2, 300, 96)],
)
def test_norm_and_router_in_one_launch_equal_reference(label: str, tokens: int, count: int, hidden: int) -> None:
    """Two calls: the counters are zero again after the first one."""
    from localllm.kernels.triton.moe_norm_route import norm_route, supports_norm_route

    routing = ROUTINGS[label]
    generator = torch.Generator().manual_seed(11)
    dtype = torch.float32 if INTERPRETED else torch.bfloat16

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, stream, weight = random(tokens, hidden), random(tokens, hidden), random(hidden)
    router = random(count, hidden) / 8
    bias = torch.randn(count, generator=generator) if label == "many" else None
    correction = torch.randn(count, generator=generator) if routing.score == "sigmoid" else None
    arguments = copy_to((x, stream, (weight, 1e-6, 0.5), router, bias, routing, correction), DEVICE)
    assert supports_norm_route(arguments[0], arguments[2][0], arguments[3], arguments[6])
    for _ in range(2):
        normed, after, routed = norm_route(*arguments)
        expected, total = Ops().norm.add_rms(x.clone(), stream.clone(), weight, 1e-6, 0.5)
        torch.testing.assert_close(after.cpu(), total, rtol=0.0, atol=0.0)
        torch.testing.assert_close(normed.cpu(), expected, rtol=2 * TOLERANCES[dtype], atol=1e-5)
        logits = Ops().linear.dense(normed.cpu().double(), router.double(), None if bias is None else bias.double())
        best = Ops().moe.route(logits.float(), routing, correction)
        assert torch.equal(routed.experts.cpu(), best.experts)
        torch.testing.assert_close(routed.weights.cpu(), best.weights, rtol=1e-5, atol=1e-6)


def test_norm_and_router_in_one_launch_need_few_tokens_of_one_dtype() -> None:
    from localllm.kernels.triton.moe_norm_route import supports_norm_route

    def supported(tokens: int = 1, hidden: int = 64, norm: torch.dtype = torch.bfloat16) -> bool:
        x = torch.empty(tokens, hidden, dtype=torch.bfloat16)
        return supports_norm_route(x, torch.empty(hidden, dtype=norm), x.new_empty(8, hidden), None)

    assert supported(8, 8192)
    assert not supported(9)
    assert not supported(0)
    assert not supported(hidden=8200)
    assert not supported(norm=torch.float32)
