"""Arguments that no CPU kernel supports: the wrappers call the references for float64, unusual strides and different
dtypes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from localllm.backends.cpu import device as cpu
from localllm.backends.pytorch.quant.int4 import quantise as int4
from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases import CASES, reference_check
from localllm.kernels.ops.cases.case import Case
from localllm.kernels.ops.cases.moe import FORMATS
from localllm.kernels.ops.layer import DecoderLayer
from localllm.kernels.ops.mlp import GatedMlp
from localllm.kernels.ops.projection import Product, SideBySide

pytestmark = [pytest.mark.real, pytest.mark.skipif(bool(cpu.MISSING), reason=cpu.MISSING or "")]

REFERENCE, FAST = Ops(), cpu.OPS
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
# Their kernels take the packed weight whatever x is.
QUANTISED = ("linear.int", "linear.fp8", "linear.mxfp4", "moe.experts-int", "moe.experts-fp8", "moe.experts-mxfp4")
PRODUCTS = [f"linear.{op}" for op in FORMATS]
FLOATS = [case for case in CASES if not str(case).startswith(QUANTISED) and "float8" not in case.label]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def near(found: Any, expected: Any) -> None:
    """Both tensors have the same dtype and differ by at most one rounding."""
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("case", FLOATS, ids=str)
def test_float64_equals_the_reference(case: Case) -> None:
    arguments, expected = reference_check.reference_run(case, dict(REFERENCE)[case.op], F32)
    wide = {name: reference_check.copy_to(value, "cpu", wide=True) for name, value in arguments.items()}
    for found, other in zip(
        reference_check.call_op(
            case, dict(FAST)[case.op], reference_check.device_arguments(case, FAST, wide, "cpu", F64)
        ),
        expected,
        strict=True,
    ):
        near(found, other)


@pytest.mark.parametrize("wide", ["x", "weight"])
def test_norms_of_different_dtypes(wide: str) -> None:
    given = {"x": numbers(3, 8), "weight": numbers(8, seed=1)}
    given[wide] = given[wide].double()
    near(FAST.norm.rms(**given, eps=1e-6), REFERENCE.norm.rms(**given, eps=1e-6))
    residual = numbers(3, 8, seed=2).to(given["x"].dtype)
    expected = REFERENCE.norm.add_rms(**given, residual=residual, eps=1e-6)
    near(FAST.norm.add_rms(**given, residual=residual.clone(), eps=1e-6), expected)


@pytest.mark.parametrize(
    ("x", "residual"),
    [
        (numbers(3, 8).to(BF16), numbers(3, 8, seed=1)),
        (numbers(3, 8), numbers(8, 3, seed=1).t()),
        (numbers(3, 2, 8), numbers(3, 2, 8, seed=1)),
    ],
    ids=["another type", "strided", "more dimensions"],
)
def test_residuals_that_cannot_be_overwritten(x: torch.Tensor, residual: torch.Tensor) -> None:
    weight = numbers(8, seed=2)
    expected = REFERENCE.norm.add_rms(x, residual, weight, 1e-6)
    near(FAST.norm.add_rms(x, residual.clone(memory_format=torch.preserve_format), weight, 1e-6), expected)


def test_strided_inputs() -> None:
    x, weight = numbers(8, 6).t(), numbers(8, seed=1)
    near(FAST.norm.rms(x, weight, 1e-6), REFERENCE.norm.rms(x, weight, 1e-6))
    near(FAST.activation.silu_and_mul(x), REFERENCE.activation.silu_and_mul(x))
    heads = numbers(4, 3, 8, seed=2)
    for part in (heads[..., ::2], heads.transpose(1, 2), heads[:, ::2], heads[..., :4]):
        near(
            FAST.norm.rms(part, weight[: part.shape[2]], 1e-6), REFERENCE.norm.rms(part, weight[: part.shape[2]], 1e-6)
        )


HEADS = {
    "every second number": lambda: numbers(4, 3, 16)[..., ::2],
    "a part of each head": lambda: numbers(4, 3, 16)[..., :8],
    "every second head": lambda: numbers(4, 5, 8)[:, ::2],
    "turned": lambda: numbers(4, 8, 3).transpose(1, 2),
    "a part of one head": lambda: numbers(4, 1, 16)[..., :8],
}


@pytest.mark.parametrize("kind", HEADS)
def test_strided_heads(kind: str) -> None:
    heads, cos, sin = HEADS[kind](), numbers(4, 4, seed=1), numbers(4, 4, seed=2)
    dense = heads.contiguous()
    for name in ("neox", "interleaved"):
        fast, expected = getattr(FAST.rope, name), getattr(REFERENCE.rope, name)(dense, dense, cos, sin)
        near(fast(HEADS[kind](), dense.clone(), cos, sin), expected)
        near(fast(dense.clone(), HEADS[kind](), cos, sin), expected)
        near(fast(dense.clone(), dense.clone(), cos.t().contiguous().t(), sin.t().contiguous().t()), expected)
    pages = torch.zeros(2, 2, 4, *heads.shape[1:])
    slots = torch.tensor([6, 1, 0, 3])
    FAST.kv.store(heads, dense, *pages, slots)
    assert torch.equal(pages[0].flatten(0, 1)[slots], dense)
    pages.zero_()
    FAST.kv.store(dense, heads, *pages, slots)
    assert torch.equal(pages[1].flatten(0, 1)[slots], dense)


@pytest.mark.parametrize("name", ["neox", "interleaved"])
def test_rotations_of_different_dtypes(name: str) -> None:
    query, key, cos, sin = numbers(4, 3, 8), numbers(4, 2, 8, seed=3), numbers(4, 4, seed=1), numbers(4, 4, seed=2)
    fast, reference = getattr(FAST.rope, name), getattr(REFERENCE.rope, name)
    for given in ((query.double(), key), (query, key.double())):
        near(fast(*(one.clone() for one in given), cos, sin), reference(*given, cos, sin))
    tables = cos.double(), sin.double()
    near(fast(query.clone(), key.clone(), *tables), reference(query, key, *tables))


@pytest.mark.parametrize("kind", ["query", "pages"])
def test_caches_of_different_dtypes(kind: str) -> None:
    """Cache writes and attention with a float64 cache or float64 inputs."""
    (case,) = (case for case in CASES if str(case) == "kv.append-plain")
    arguments, _ = reference_check.reference_run(case, REFERENCE.kv.append, F32)
    target = arguments["target"]
    if kind == "query":
        arguments["qkv"] = arguments["qkv"].double()
        target = target._replace(query_norm=target.query_norm.double(), key_norm=target.key_norm.double())
    else:
        target = target._replace(key_pages=target.key_pages.double(), value_pages=target.value_pages.double())
    pages = [[x.clone() for x in (target.key_pages, target.value_pages)] for _ in range(2)]
    answers = [
        ops.kv.append(
            **arguments
            | {"qkv": arguments["qkv"].clone(), "target": target._replace(key_pages=keys, value_pages=values)}
        )
        for ops, (keys, values) in zip((FAST, REFERENCE), pages, strict=True)
    ]
    near(answers[0], answers[1])
    near(pages[0], pages[1])
    key, value = arguments["qkv"][:, 4:6], arguments["qkv"][:, 6:]
    for ops, own in zip((FAST, REFERENCE), pages, strict=True):
        ops.kv.store(key, value, *own, arguments["slots"])
    near(pages[0], pages[1])


@pytest.mark.parametrize("strides", ["every second number", "a part of each head", "every second head"])
def test_attention_of_strided_queries(strides: str) -> None:
    (case,) = (case for case in CASES if str(case) == "attention.paged-mixed")
    arguments, _ = reference_check.reference_run(case, REFERENCE.attention.paged, F32)
    query = arguments["query"]
    room = query.new_full((query.shape[0], 2 * query.shape[1], 2 * query.shape[2]), torch.nan)
    apart = {
        "every second number": room[:, : query.shape[1], ::2],
        "a part of each head": room[:, : query.shape[1], : query.shape[2]],
        "every second head": room[:, ::2].as_strided(query.shape, (room.stride(0), 2 * room.stride(1), 1)),
    }[strides]
    apart.copy_(query)
    near(FAST.attention.paged(**arguments | {"query": apart}), FAST.attention.paged(**arguments))


def test_token_ids_of_64_bits() -> None:
    tokens, weight = torch.tensor([3, 0, 4]), numbers(5, 8)
    near(FAST.linear.embedding(tokens, weight), weight[tokens])


@pytest.mark.parametrize("dtype", [BF16, F64], ids=str)
def test_logits_of_other_dtypes(dtype: torch.dtype) -> None:
    logits = numbers(3, 50).to(dtype)
    tokens, rows, words = torch.tensor([1, 2, 3]), torch.tensor([2, 0]), torch.tensor([[7, 1], [-1, 0]]).int()
    assert torch.equal(FAST.sampling.greedy(logits), logits.argmax(-1))
    for k in (0, 4):
        near(tuple(FAST.sampling.logprobs(logits, tokens, k)), tuple(REFERENCE.sampling.logprobs(logits, tokens, k)))
    masked = logits.clone(), logits.clone()
    FAST.sampling.mask(masked[0], rows, words)
    REFERENCE.sampling.mask(masked[1], rows, words)
    assert torch.equal(*masked)
    (case,) = (case for case in CASES if str(case) == "sampling.draw-all")
    arguments, _ = reference_check.reference_run(case, REFERENCE.sampling.draw, F32)
    wide = arguments["logits"].to(dtype)
    expected = REFERENCE.sampling.draw(wide, arguments["draws"])
    assert torch.equal(FAST.sampling.draw(wide, arguments["draws"]), expected)


def test_a_layer_without_a_fused_kernel_stays_unchanged() -> None:
    """The op of a layer needs packed weights with inputs in natural order, and at most one kind of int4 product. It
    ends before an MLP that does not meet these conditions."""
    from localllm.kernels.cpu.step.layer import Prepared

    (case,) = (case for case in CASES if str(case) == "layer.decoder-decode")
    arguments, _ = reference_check.reference_run(case, REFERENCE.layer.decoder, F32)
    plain = arguments["layer"]
    plains = plain.qkv, plain.out, plain.mlp.gate_up, plain.mlp.down

    def prepared(ops: tuple[str, ...], ordered: int = 4, packs: int = 4, foreign: bool = False) -> Any:
        """`ordered`: the index of the product whose inputs are permuted; 4: none."""
        made = []
        for at, (product, op) in enumerate(zip(plains, ops, strict=True)):
            order = torch.arange(product.weight.shape[1]) if at == ordered else None
            weight = int4(product.weight) if op.startswith("int4") else product.weight
            held = FAST.linear.pack(weight, F32) if at < packs else weight
            made.append(Product(op, held, None, order))
        qkv, out, *rest = made
        gated = GatedMlp(*rest, plain.mlp.gate)
        mlp = (lambda *step: gated(*step)) if foreign else gated
        return FAST.layer.prepare(dataclasses.replace(plain, qkv=qkv, out=out, mlp=mlp))

    for kinds in (("dense",) * 4, ("int4",) * 4, ("int4_wide",) * 4, ("int4", "dense", "int4", "dense")):
        assert isinstance(prepared(kinds), Prepared)
    assert prepared(("int4_wide",) * 4).weights[-1] is True
    assert prepared(("int4",) * 4).weights[-1] is False
    assert isinstance(prepared(("int4", "int4_wide", "dense", "dense")), DecoderLayer)
    assert isinstance(prepared(("dense",) * 4, ordered=1), DecoderLayer)
    assert isinstance(prepared(("dense",) * 4, packs=1), DecoderLayer)
    assert prepared(("dense",) * 4).has_mlp
    for without_mlp in ({"ordered": 3}, {"packs": 3}, {"foreign": True}):
        assert not prepared(("dense",) * 4, **without_mlp).has_mlp


@pytest.mark.parametrize("label", PRODUCTS)
def test_products_of_inputs_with_more_dimensions(label: str) -> None:
    (case,) = (case for case in CASES if str(case) == f"{label}-bias")
    arguments, _ = reference_check.reference_run(case, dict(REFERENCE)[case.op], F32)
    for ops in (FAST, REFERENCE):
        given = reference_check.device_arguments(case, ops, arguments, "cpu", F32)
        op, x = dict(ops)[case.op], given.pop("x")
        expected = op(x, **given)
        for shape in ((5, 1), (1, 5), (1, 5, 1)):
            near(op(x.view(*shape, -1), **given), expected.view(*shape, -1))
        near(op(x[0], **given), expected[0])


@pytest.mark.parametrize("label", PRODUCTS)
def test_the_reference_computes_weights_that_are_not_packed(label: str) -> None:
    (case,) = (case for case in CASES if str(case) == f"{label}-bias")
    arguments, _ = reference_check.reference_run(case, dict(REFERENCE)[case.op], F32)
    plain = reference_check.device_arguments(case, REFERENCE, arguments, "cpu", F32)
    assert torch.equal(dict(FAST)[case.op](**plain), dict(REFERENCE)[case.op](**plain))


def test_projections_permute_inputs_and_concatenate_outputs() -> None:
    x, weight, shift, order = numbers(3, 8), numbers(5, 8, seed=1), numbers(5, seed=2), torch.randperm(8)
    ordered, plain = Product("dense", weight[:, order], shift, order), Product("dense", weight[:2])
    for ops in (FAST, REFERENCE):
        near(ordered(x, ops), x @ weight.t() + shift)
        both = SideBySide((ordered, plain))(x.to(BF16), ops, dtype=F32)
        assert both.dtype == F32
        torch.testing.assert_close(both[:, :5], x @ weight.t() + shift, rtol=0, atol=0.1)
        torch.testing.assert_close(both[:, 5:], x @ weight[:2].t(), rtol=0, atol=0.1)
