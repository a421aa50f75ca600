"""Mixtures of experts on the CPU in every ISA variant of this machine: equal bits for any number of threads and in any
batch, chunks of many tokens, packing in slices, NaN, the router and its experts in one op."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from localllm.backends.cpu import device as cpu
from localllm.kernels.ops.cases.moe import FORMATS, random_experts
from localllm.kernels.ops.linear import map_tensors, weight_tensors
from localllm.kernels.ops.mlp import Experts
from localllm.kernels.ops.moe import ExpertWeights, Routed, Routing, experts
from localllm.kernels.ops.projection import Product

pytestmark = [pytest.mark.real, pytest.mark.skipif(bool(cpu.MISSING), reason=cpu.MISSING or "")]

VARIANTS = [] if cpu.MISSING else torch.ops.localllm.variants().split()
EXPERTS = 5
HIDDEN = 96
INNER = 64


@pytest.fixture(params=VARIANTS, autouse=True)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Outputs are full of NaN before they are written."""
    before = torch.ops.localllm.threads()
    shared_work = torch.ops.localllm.share_from(0)
    torch.ops.localllm.use_variant(request.param)
    torch.use_deterministic_algorithms(True)
    yield request.param
    torch.use_deterministic_algorithms(False)
    torch.ops.localllm.share_from(shared_work)
    torch.ops.localllm.use_threads(before)
    torch.ops.localllm.use_variant("")


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def inputs(op: str, tokens: int, dtype: torch.dtype, top_k: int = 3) -> tuple[Tensor, Routed, ExpertWeights]:
    """Arguments of `experts`; half of the tokens choose expert 0 first, so that it has several segments."""
    random = generator()
    weights = cpu.OPS.moe.pack(random_experts(op, EXPERTS, HIDDEN, INNER, random, dtype, bias=True), dtype)
    chosen = torch.rand(tokens, EXPERTS, generator=random)
    chosen[::2, 0] = 2.0
    ids = chosen.argsort(1, descending=True)[:, :top_k].int().contiguous()
    x = torch.randn(tokens, HIDDEN, generator=random).to(dtype)
    return x, Routed(ids, torch.rand(tokens, top_k, generator=random)), weights


def rows_of(routed: Routed, rows: slice) -> Routed:
    return Routed(routed.experts[rows].contiguous(), routed.weights[rows].contiguous())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", FORMATS)
def test_any_number_of_threads_computes_the_same_bits(op: str, dtype: torch.dtype) -> None:
    x, routed, weights = inputs(op, 300, dtype)
    torch.ops.localllm.use_threads(1)
    expected = cpu.OPS.moe.experts(x, routed, weights)
    assert expected.isfinite().all()
    for threads in (2, 3, 5):
        torch.ops.localllm.use_threads(threads)
        assert torch.equal(cpu.OPS.moe.experts(x, routed, weights), expected)


@pytest.mark.parametrize("op", ["dense", "int8", "int4"])
def test_a_token_has_the_same_bits_in_any_batch(op: str, variant: str) -> None:
    if variant == "amx":
        pytest.skip("tiles and vectors add in different orders")
    x, routed, weights = inputs(op, 40, torch.bfloat16)
    expected = cpu.OPS.moe.experts(x, routed, weights)
    for rows in (slice(0, 1), slice(5, 7), slice(30, 40)):
        assert torch.equal(cpu.OPS.moe.experts(x[rows], rows_of(routed, rows), weights), expected[rows])


@pytest.mark.parametrize("op", FORMATS)
def test_rows_of_a_wider_tensor_are_read_in_place(op: str) -> None:
    x, routed, weights = inputs(op, 20, torch.bfloat16)
    wide = torch.full((20, HIDDEN + 5), torch.nan).bfloat16()
    wide[:, :HIDDEN] = x
    result = cpu.OPS.moe.experts(wide[:, :HIDDEN], routed, weights)
    assert torch.equal(result, cpu.OPS.moe.experts(x, routed, weights))


@pytest.mark.parametrize("op", FORMATS)
def test_nan_stays_in_its_token(op: str) -> None:
    x, routed, weights = inputs(op, 40, torch.bfloat16)
    expected = cpu.OPS.moe.experts(x, routed, weights)
    x[7, 3] = torch.nan
    result = cpu.OPS.moe.experts(x, routed, weights)
    assert result[7].isnan().all()
    others = [token for token in range(40) if token != 7]
    assert torch.equal(result[others], expected[others])


def test_weights_of_tiny_scores_are_finite() -> None:
    """The sigmoid of the logits is less than the smallest normal float32."""
    for top_k in (1, 3):
        routed = cpu.OPS.moe.route(torch.full((2, 4), -200.0), Routing(top_k, "sigmoid", True, scale=2.5))
        torch.testing.assert_close(routed.weights, torch.zeros(2, top_k))


def test_many_tokens_are_computed_in_chunks(variant: str) -> None:
    """The results of these tokens need more memory than the op allocates at a time."""
    if variant != VARIANTS[-1]:
        pytest.skip("the same code in every variant")
    tokens = 2200
    hidden = 2048
    random = generator()
    weights = random_experts("int8", 4, hidden, 32, random, torch.bfloat16)
    routed = Routed(
        torch.arange(4, dtype=torch.int32).expand(tokens, 4).contiguous(), torch.rand(tokens, 4, generator=random)
    )
    x = torch.randn(tokens, hidden, generator=random).bfloat16()
    packed = cpu.OPS.moe.pack(weights, torch.bfloat16)
    result = cpu.OPS.moe.experts(x, routed, packed)
    for rows in (slice(0, 33), slice(tokens // 2 - 20, tokens // 2 + 20), slice(tokens - 33, tokens)):
        part = experts(x[rows].double(), rows_of(routed, rows), weights)
        torch.testing.assert_close(result[rows].double(), part, rtol=0.0, atol=0.02 * part.abs().max().item())


@pytest.mark.parametrize("inner", [64, 29])
@pytest.mark.parametrize("op", FORMATS)
def test_slices_within_an_expert_are_packed_as_one(op: str, inner: int, variant: str) -> None:
    """Gates and ups arrive as two slices, which may end within a panel. A slice is invalid after the next one."""
    if variant != VARIANTS[-1]:
        pytest.skip("the layout is the same in every variant")
    weights = random_experts(op, 3, 64, inner, generator(), torch.bfloat16)
    whole = cpu.OPS.moe.pack(weights._replace(down=weights.gate_up), torch.bfloat16).gate_up

    def slices() -> Iterator[object]:
        for first in range(0, 6 * inner, inner):
            part = map_tensors(weights.gate_up, lambda tensor, first=first: tensor[first : first + inner].clone())
            yield part
            for tensor in weight_tensors(part):
                tensor.view(torch.uint8).fill_(1)

    packed = cpu.OPS.moe.pack_slices(slices(), 3, 2 * inner, torch.bfloat16)
    assert torch.equal(packed.data, whole.data)
    assert packed[1:] == whole[1:]


ROUTINGS = {
    "softmax": Routing(3, "softmax", True),
    "sigmoid-groups": Routing(2, "sigmoid", False, 2.5, EXPERTS, 3),
}


def mixture(op: str, dtype: torch.dtype, routing: Routing, router_dtype: torch.dtype) -> Experts:
    """A router with a bias and a correction, and its experts."""
    random = generator()
    weights = cpu.OPS.moe.pack(random_experts(op, EXPERTS, HIDDEN, INNER, random, dtype, bias=True), dtype)
    plain = torch.randn(EXPERTS, HIDDEN, generator=random).to(router_dtype)
    router = Product("dense", cpu.OPS.linear.pack(plain, dtype), torch.randn(EXPERTS, generator=random))
    return Experts(router, routing, torch.randn(EXPERTS, generator=random), weights)


def one_op(mlp: Experts, x: Tensor) -> Tensor:
    from localllm.kernels.cpu.moe import experts as moe

    arguments = moe.prepare(mlp)
    assert arguments is not None
    return moe.routed_experts(x, arguments)


def two_ops(mlp: Experts, x: Tensor) -> Tensor:
    routed = cpu.OPS.moe.route(mlp.router(x, cpu.OPS, None, torch.float32), mlp.routing, mlp.correction)
    result: Tensor = cpu.OPS.moe.experts(x, routed, mlp.weights)
    return result


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", FORMATS)
def test_router_and_experts_in_one_op_have_the_same_bits(op: str, dtype: torch.dtype, routing: Routing) -> None:
    mlp = mixture(op, dtype, routing, torch.bfloat16 if op == "int8" else dtype)
    for tokens in (0, 1, 3, 70):
        x = torch.randn(tokens, 2 * HIDDEN, generator=generator()).to(dtype)[:, :HIDDEN]
        for threads in (1, 3):
            torch.ops.localllm.use_threads(threads)
            assert torch.equal(one_op(mlp, x), two_ops(mlp, x))


def test_router_and_experts_in_one_op_compute_many_tokens_in_chunks(variant: str) -> None:
    if variant != VARIANTS[-1]:
        pytest.skip("the chunks do not depend on the variant")
    mlp = mixture("dense", torch.float32, ROUTINGS["softmax"], torch.float32)
    x = torch.randn((64 << 20) // (4 * 3 * HIDDEN) + 100, HIDDEN, generator=generator())
    assert torch.equal(one_op(mlp, x), two_ops(mlp, x))


def test_routers_and_experts_that_one_op_does_not_support() -> None:
    from localllm.kernels.cpu.moe import experts as moe

    mlp = mixture("dense", torch.float32, ROUTINGS["softmax"], torch.float32)
    assert isinstance(mlp.router, Product)
    others = (
        mlp._replace(router=mlp.router._replace(order=torch.arange(HIDDEN))),
        mlp._replace(router=mlp.router._replace(op="int8")),
        mlp._replace(router=mlp.router._replace(weight=torch.zeros(EXPERTS, HIDDEN))),
        mlp._replace(weights=mlp.weights._replace(gate_up=torch.zeros(EXPERTS * 2 * INNER, HIDDEN))),
        mlp._replace(weights=mlp.weights._replace(inner=INNER + 1)),
    )
    assert moe.prepare(mlp) is not None
    assert [moe.prepare(other) for other in others] == [None] * len(others)
