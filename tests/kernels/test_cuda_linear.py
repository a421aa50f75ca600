"""Products on a CUDA device against the references, in every format, for small and large batches."""

from __future__ import annotations

import importlib
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from localllm.kernels.compiled.arguments import GATES
from localllm.kernels.ops import Ops, activation
from localllm.kernels.ops.activation import silu_and_mul
from localllm.kernels.ops.cases import CASES
from localllm.kernels.ops.cases.case import Case
from localllm.kernels.ops.cases.layer import CACHE, inputs
from localllm.kernels.ops.cases.reference_check import call_op, copy_to, pack_value
from localllm.kernels.ops.linear import Fp8, Int4, Int8, Linear, Weight
from localllm.kernels.ops.linear_int8 import rounded
from localllm.kernels.ops.norm import add_rms_norm
from localllm.kernels.ops.projection import Product

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

RUNS = [
    (case, dtype)
    for case in CASES
    if case.op.startswith("linear.") and case.op != "linear.embedding"
    for dtype in case.tolerances
]
FORMATS = ("dense", "int8", "int4", "int4_wide", "fp8")


@pytest.fixture(scope="module")
def linear() -> Linear:
    importlib.import_module("localllm.kernels.cuda")
    from localllm.kernels.cuda.products import linear as ours

    products = {name: getattr(ours, name) for name in (*FORMATS, "mxfp4")}
    return Linear(**products, pack_slices=ours.pack_slices)


def weight_of(op: str, out_features: int, in_features: int, group: int, generator: torch.Generator) -> Weight:
    groups = -(-in_features // group)
    if op == "dense":
        return (torch.randn(out_features, in_features, generator=generator) / in_features**0.5).bfloat16()
    if op == "int8":
        data = torch.randint(-127, 128, (out_features, in_features), generator=generator).to(torch.int8)
        return Int8(data, torch.rand(out_features, generator=generator) / (64.0 * in_features**0.5))
    if op == "fp8":
        data = (torch.randn(out_features, in_features, generator=generator) * 100.0).clamp(-448.0, 448.0)
        scale = torch.rand(out_features, groups, generator=generator) / (100.0 * in_features**0.5)
        return Fp8(data.to(torch.float8_e4m3fn), scale, group)
    data = torch.randint(0, 256, (out_features, -(-in_features // 2)), generator=generator).to(torch.uint8)
    scale = (torch.rand(out_features, groups, generator=generator) / (4.0 * in_features**0.5)).half()
    return Int4(
        data,
        scale,
        torch.randint(0, 17, (out_features, groups), generator=generator).to(torch.uint8),
        group,
        in_features,
    )


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    scale = expected.abs().max().item() if expected.numel() else 1.0
    torch.testing.assert_close(found.cpu().double(), expected.double(), rtol=0.0, atol=tolerance * max(scale, 1e-6))


@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=[f"{case}-{dtype}" for case, dtype in RUNS])
def test_op_equals_reference(linear: Linear, case: Case, dtype: torch.dtype) -> None:
    arguments = dict(case.make(torch.Generator().manual_seed(7), dtype))
    expected = call_op(case, dict(Ops())[case.op], {k: copy_to(v, "cpu", wide=True) for k, v in arguments.items()})
    given = {name: copy_to(value, "cuda") for name, value in arguments.items()}
    given["weight"] = linear.pack(given["weight"], dtype)
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    try:
        found = call_op(case, getattr(linear, case.op.split(".")[1]), given)
    finally:
        torch.use_deterministic_algorithms(False)
    close(found[0], expected[0], case.tolerances[dtype])


@pytest.mark.parametrize("op", FORMATS)
def test_random_shapes(linear: Linear, op: str) -> None:
    """60 products of each format with up to 16 rows and a few more, any outputs, and inputs that fill whole vectors."""
    from localllm.kernels.cuda.products.linear import INT4_WIDE, fits, small_batch

    draw, generator = random.Random(op), torch.Generator().manual_seed(1)
    torch.use_deterministic_algorithms(True)
    for _ in range(60):
        rows, out_features, in_features = (
            draw.choice([*range(1, 18), 40]),
            draw.randint(1, 700),
            8 * draw.randint(1, 300),
        )
        group = draw.choice([32, 64, 128, 256]) if op.startswith("int4") else draw.choice([64, 128, in_features])
        weight, x = (
            weight_of(op, out_features, in_features, group, generator),
            torch.randn(rows, in_features, generator=generator).bfloat16(),
        )
        bias = torch.randn(out_features, generator=generator) if draw.random() < 0.3 else None
        expected = getattr(Ops().linear, op)(x.double(), copy_to(weight, "cpu", wide=True), bias, torch.float64)
        packed = linear.pack(copy_to(weight, "cuda"), torch.bfloat16)
        shift = None if bias is None else bias.cuda()
        format = INT4_WIDE if op == "int4_wide" else None
        if rows <= 16 and fits(packed, rows, format):
            found = small_batch(x.cuda(), packed, shift, torch.float32, format)
        else:
            found = getattr(linear, op)(x.cuda(), packed, shift, torch.float32)
        close(found, expected, 6e-3)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("op", ["int8", "int4", "int4_wide", "fp8"])
def test_random_tiled_products(linear: Linear, op: str) -> None:
    """30 products of each format with up to 300 rows, with rows apart and every float dtype. A second call has the
    same bits, so sums have a fixed order."""
    from localllm.kernels.cuda.products.linear import INT4_WIDE, tiled

    draw, generator = random.Random(op), torch.Generator().manual_seed(9)
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    for _ in range(30):
        rows = draw.choice([1, 2, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129, 257, 300])
        out_features, in_features = draw.randint(1, 700), 8 * draw.randint(1, 300)
        group = draw.choice([32, 64, 96, 128, 256] if op.startswith("int4") else [64, 128, 192, in_features])
        weight = weight_of(op, out_features, in_features, group, generator)
        x = torch.randn(rows, in_features + draw.choice([0, 8]), generator=generator).bfloat16()
        bias = torch.randn(out_features, generator=generator) if draw.random() < 0.3 else None
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
        expected = getattr(Ops().linear, op)(
            x[:, :in_features].double(), copy_to(weight, "cpu", wide=True), bias, torch.float64
        )
        packed = linear.pack(copy_to(weight, "cuda"), torch.bfloat16)
        shift = None if bias is None else bias.cuda()
        format = INT4_WIDE if op == "int4_wide" else packed.format
        first, second = (tiled(x.cuda()[:, :in_features], packed, shift, dtype, format) for _ in range(2))
        # For more than 64 rows, int4 products round the activations to bf16.
        close(first, expected, 2e-3 if dtype == torch.float32 and (op != "int4" or rows <= 64) else 6e-3)
        assert torch.equal(first, second)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("op", ["int4", "fp8"])
def test_widened_weights_equal_the_reference(linear: Linear, op: str) -> None:
    """All bits: a dequantised weight is the float32 product of value and scale, rounded to bf16."""
    from localllm.kernels.cuda.products.linear import widen

    draw, generator = random.Random(op), torch.Generator().manual_seed(13)
    for _ in range(60):
        out_features, in_features = draw.randint(1, 300), 8 * draw.choice([draw.randint(1, 300), 700, 1800])
        group = draw.choice([32, 64, 96, 128, 160, 256] if op == "int4" else [64, 128, 192, 256])
        weight = weight_of(op, out_features, in_features, draw.choice([group, in_features]), generator)
        identity = torch.eye(in_features)
        expected = getattr(Ops().linear, "fp8" if op == "fp8" else "int4_wide")(identity, weight).t().bfloat16()
        packed = linear.pack(copy_to(weight, "cuda"), torch.bfloat16)
        first = 8 * draw.randrange(-(-out_features // 8))
        count = draw.randint(1, out_features - first)
        out = torch.full((count + 1, in_features), torch.nan, device="cuda", dtype=torch.bfloat16)
        widen(packed, first, out[:count])
        assert torch.equal(out[:count].cpu(), expected[first : first + count])
        assert out[count].isnan().all()


def test_rounded_groups_equal_the_reference() -> None:
    """All bits, for every group size, rows that are apart and very long rows; a NaN or infinity makes its group NaN."""
    draw, generator = random.Random(14), torch.Generator().manual_seed(14)
    for number in range(60):
        in_features = 8 * draw.choice([draw.randint(1, 500), 3600])
        group = draw.choice([32, 64, 96, 128, 256, 1024, in_features])
        rows = draw.choice([1, 17, draw.randint(2, 300)])
        x = torch.randn(rows, in_features + draw.choice([0, 8]), generator=generator).bfloat16()[:, :in_features]
        x[0, : in_features // 2] = 0.0
        if number % 3 == 0:
            x[rows - 1, draw.randrange(in_features)] = draw.choice([torch.nan, torch.inf, -torch.inf])
        groups = torch.nn.functional.pad(x.float(), (0, -in_features % group)).unflatten(-1, (-1, group))
        integers, scale = rounded(groups)
        expected = (integers * scale).flatten(-2)[:, :in_features].bfloat16()
        out = torch.full((rows, in_features), 7.0, device="cuda", dtype=torch.bfloat16)
        torch.ops.localllm.round_groups(out, x.cuda(), group)
        torch.testing.assert_close(out.cpu(), expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("op", ["int4", "int4_wide", "fp8"])
def test_random_products_with_widened_weights(linear: Linear, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of many rows, in several chunks of outputs, with rows that are apart or not aligned, and every dtype."""
    from localllm.kernels.cuda.products import linear as ours
    from localllm.kernels.gpu import widened_product

    for limits in ("TILED_ROWS", "HOPPER_TILED_ROWS"):
        monkeypatch.setattr(ours, limits, dict.fromkeys(ours.TILED_ROWS, 0))
    monkeypatch.setattr(ours, "HOPPER_GROUPED_FP8_ROWS", 0)
    monkeypatch.setattr(ours, "_triton", lambda: pytest.fail("Triton computed the product"))
    monkeypatch.setattr(widened_product, "MAX_CHUNK", 2**17)
    draw, generator = random.Random(op), torch.Generator().manual_seed(15)
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    for _ in range(30):
        rows, out_features, in_features = draw.randint(17, 300), draw.randint(1, 700), 8 * draw.randint(1, 300)
        group = draw.choice([32, 64, 96, 128, 256] if op.startswith("int4") else [64, 128, 192, in_features])
        weight = weight_of(op, out_features, in_features, group, generator)
        x = torch.randn(rows, in_features + draw.choice([0, 8, 3]), generator=generator).bfloat16()
        bias = torch.randn(out_features, generator=generator) if draw.random() < 0.3 else None
        dtype = draw.choice([None, torch.float32, torch.bfloat16, torch.float16])
        expected = getattr(Ops().linear, op)(
            x[:, :in_features].double(), copy_to(weight, "cpu", wide=True), bias, torch.float64
        )
        packed = linear.pack(copy_to(weight, "cuda"), torch.bfloat16)
        shift = None if bias is None else bias.cuda()
        found = getattr(linear, op)(x.cuda()[:, :in_features], packed, shift, dtype)
        assert found.dtype == (dtype or torch.bfloat16)
        close(found, expected, 6e-3)
    torch.use_deterministic_algorithms(False)


def test_tiled_products_round_activations_to_e4m3(linear: Linear) -> None:
    """Only Hopper rounds, and only more than 16 rows. Its tensor cores round each sum of 32 products to about 14 bits,
    so the error grows with the inputs."""
    from localllm.kernels.gpu.properties import gpu_properties

    draw, generator = random.Random(12), torch.Generator().manual_seed(12)
    is_hopper = gpu_properties(torch.device("cuda")).capability[0] == 9
    for rows in (3, 16, 17, 40, 64, 65, 200, 257, 400):
        out_features, in_features = draw.randint(1, 700), 8 * draw.choice([1, draw.randint(2, 300), 3200])
        plain = weight_of("fp8", out_features, in_features, in_features, generator)._replace(rounds=True)
        x = torch.randn(rows, in_features, generator=generator).bfloat16()
        x[0] = 0.0
        scale = x.float().abs().amax(1, keepdim=True) / 448.0
        rounded = (x.float() / scale.clamp(min=1e-30)).to(torch.float8_e4m3fn).double() * scale
        inputs = rounded if is_hopper and rows > 16 else x.double()
        packed = linear.pack(copy_to(plain, "cuda"), torch.bfloat16)
        assert packed.plain().rounds
        result = linear.fp8(x.cuda(), packed, None, torch.float32)
        expected = Ops().linear.fp8(inputs, copy_to(plain, "cpu", wide=True), None, torch.float64)
        close(result, expected, 1e-2 + in_features * 3e-6 if is_hopper else 6e-3)


@pytest.mark.parametrize("op", FORMATS)
def test_a_row_has_the_same_bits_in_every_batch(linear: Linear, op: str) -> None:
    """A batch of one row is not compared if its activations are not rounded: its kernel adds in another order."""
    from localllm.kernels.cuda.products.linear import INT4_WIDE, small_batch

    generator = torch.Generator().manual_seed(2)
    for out_features, in_features in ((1024, 2048), (776, 4096), (6144, 1024)):
        weight = linear.pack(copy_to(weight_of(op, out_features, in_features, 128, generator), "cuda"), torch.bfloat16)
        rest = weight, None, torch.bfloat16, INT4_WIDE if op == "int4_wide" else None
        x = torch.randn(16, in_features, generator=generator).bfloat16().cuda()
        whole = small_batch(x, *rest)
        for rows in (2, 5, 8, 9) if op in ("int4_wide", "fp8") else (1, 2, 5, 8, 9):
            assert torch.equal(small_batch(x[:rows], *rest), whole[:rows])


@pytest.mark.parametrize("op", ["int4_wide", "fp8"])
def test_random_products_of_one_row(linear: Linear, op: str) -> None:
    """Activations that are not rounded: any outputs, many inputs, some with a gate, bias, norm and stream. A second
    call has the same bits."""
    from localllm.kernels.cuda.products.linear import INT4_WIDE, fits, small_batch

    draw, generator = random.Random(op), torch.Generator().manual_seed(17)
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    for _ in range(60):
        out_features, in_features = (
            draw.choice([draw.randint(1, 90), 4000]),
            8 * draw.choice([1, 7, 130, 257, 640, 1790]),
        )
        gate = draw.choice([-1, -1, 0, 1, 2])
        if gate >= 0:
            out_features = 16 * (out_features // 16 + 1)
        group = draw.choice([32, 64, 128] if op == "int4_wide" else [64, 128, 256, in_features])
        weight = weight_of(op, out_features, in_features, group, generator)
        packed = linear.pack(copy_to(weight, "cuda"), torch.bfloat16)
        x, stream = (torch.randn(1, in_features, generator=generator).bfloat16() for _ in range(2))
        bias = torch.randn(out_features, generator=generator) if draw.random() < 0.3 else None
        shift = None if bias is None else bias.cuda()
        dtype = torch.bfloat16 if gate >= 0 else torch.float32
        format = INT4_WIDE if op == "int4_wide" else None
        norm = None
        held = x
        if draw.random() < 0.5 and fits(packed, 1, format, gated=gate >= 0, normed=True):
            norm = torch.rand(in_features, generator=generator).bfloat16()
            held, summed = add_rms_norm(x, stream.clone(), norm, 1e-6)
        normed = None if norm is None else (norm.cuda(), 1e-6, 0.0)
        rest = packed, shift, dtype, format, normed, None if norm is None else stream.cuda(), gate
        first, second = (small_batch(x.cuda(), *rest) for _ in range(2))
        expected = getattr(Ops().linear, op)(held.double(), copy_to(weight, "cpu", wide=True), bias, torch.float64)
        if gate >= 0:
            expected = getattr(activation, list(GATES)[gate])(expected.bfloat16())
        if norm is not None:
            assert torch.equal(first[1].cpu(), summed)
            assert torch.equal(first[0], second[0])
            first, second = first[0], second[0]
        close(first, expected, 1e-2 if gate >= 0 or norm is not None else 2e-3)
        assert torch.equal(first, second)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("op", "group"), [("dense", 64), ("int8", 64), ("int4", 32), ("int4", 64), ("int4", 128)])
@pytest.mark.parametrize(("out_features", "in_features"), [(40016, 520), (1000, 14336), (77, 8192), (4096, 4096)])
def test_one_row_has_the_bits_that_it_has_among_two(
    linear: Linear, op: str, group: int, out_features: int, in_features: int
) -> None:
    """A product of one row has kernels of its own (one_row*.cu): blocks with many tiles, long rows, partial blocks."""
    from localllm.kernels.cuda.products.linear import small_batch

    generator = torch.Generator().manual_seed(6)
    weight = linear.pack(copy_to(weight_of(op, out_features, in_features, group, generator), "cuda"), torch.bfloat16)
    x = torch.randn(2, in_features, generator=generator).bfloat16().cuda()
    bias = torch.randn(out_features, generator=generator).cuda()
    for gate in (-1, 0) if out_features % 16 == 0 else (-1,):
        both = small_batch(x, weight, bias, torch.bfloat16, None, gate=gate)
        for _ in range(5):  # data that one call leaves in shared memory must not affect the next
            assert torch.equal(small_batch(x[:1], weight, bias, torch.bfloat16, None, gate=gate), both[:1])


def test_one_row_without_its_kernel_has_the_same_result(linear: Linear) -> None:
    """Rows too long for a fused norm, records at any address, weights that a kernel may still write."""
    from localllm.kernels.cuda.products.linear import small_batch

    generator = torch.Generator().manual_seed(8)
    x, stream = (torch.randn(1, 8192, generator=generator).bfloat16().cuda() for _ in range(2))
    norm = torch.rand(8192, generator=generator).bfloat16().cuda()
    weight = linear.pack(copy_to(weight_of("int8", 77, 8192, 128, generator), "cuda"), torch.bfloat16)
    longer = weight._replace(data=torch.nn.functional.pad(weight.data, (0, 64)))
    found, expected = (
        small_batch(x, one, None, torch.bfloat16, None, (norm, 1e-6, 0.0), stream) for one in (longer, weight)
    )
    assert torch.equal(found[1], expected[1])
    close(found[0], expected[0].cpu(), 2e-2)

    out = torch.empty(1, 77, device="cuda", dtype=torch.bfloat16)
    held = weight.data, weight.records, weight.scale, None, weight.format, weight.group
    torch.ops.localllm.small_batch(out, x, *held, False, None, None, None, 0.0, 0.0, -1)
    assert torch.equal(out, small_batch(x, weight, None, torch.bfloat16))

    weight = linear.pack(copy_to(weight_of("int4", 77, 8192, 128, generator), "cuda"), torch.bfloat16)
    shifted = torch.empty(1 + weight.records.numel(), device="cuda", dtype=torch.int32)[1:].view_as(weight.records)
    own = small_batch(x, weight._replace(records=shifted.copy_(weight.records)), None, torch.bfloat16)
    assert torch.equal(own, small_batch(x, weight, None, torch.bfloat16))


@pytest.mark.parametrize("rows", [3, 40])
def test_a_captured_chain_equals_single_calls(linear: Linear, rows: int) -> None:
    """Kernels that prefetch weights before the previous kernel has ended still wait for its result."""
    generator = torch.Generator().manual_seed(3)
    weights: list[Any] = []
    for op in FORMATS * 3:
        weights.append((op, linear.pack(copy_to(weight_of(op, 1024, 1024, 128, generator), "cuda"), torch.bfloat16)))
    x = torch.randn(rows, 1024, generator=generator).bfloat16().cuda()

    def chain(each: Any = lambda: None) -> torch.Tensor:
        y = x
        for op, weight in weights:
            y = getattr(linear, op)(y, weight)
            y = y / y.abs().amax(-1, keepdim=True) if op == "fp8" else y
            each()
        return y

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(50):
        x.normal_()
        expected = chain(torch.cuda.synchronize)
        graph.replay()
        assert torch.equal(captured, expected)


@pytest.mark.parametrize("op", ["dense", "int8", "int4", "fp8"])
@pytest.mark.parametrize(("rows", "in_features"), [(1, 1024), (3, 1024), (8, 1024), (1, 5120), (1, 8192)])
def test_fused_norm_and_gate(linear: Linear, op: str, rows: int, in_features: int) -> None:
    from localllm.kernels.cuda.products.linear import small_batch

    generator = torch.Generator().manual_seed(4)
    weight = weight_of(op, 2 * 344, in_features, 128, generator)
    packed = linear.pack(copy_to(weight, "cuda"), torch.bfloat16)
    x, stream = (torch.randn(rows, in_features, generator=generator).bfloat16().cuda() for _ in range(2))
    norm = torch.rand(in_features, generator=generator).bfloat16().cuda()
    found, after = small_batch(x, packed, None, torch.bfloat16, None, (norm, 1e-6, 0.0), stream, gate=0)
    held, summed = add_rms_norm(x, stream.clone(), norm, 1e-6)
    expected = silu_and_mul(getattr(linear, op)(held, packed))
    assert torch.equal(after, summed)
    close(found, expected.cpu(), 2e-2)


@pytest.mark.parametrize("rows", [4, 20])
def test_a_nan_stays_in_its_row(linear: Linear, rows: int) -> None:
    generator = torch.Generator().manual_seed(5)
    for op in FORMATS:
        weight = linear.pack(copy_to(weight_of(op, 64, 256, 64, generator), "cuda"), torch.bfloat16)
        x = torch.randn(rows, 256, generator=generator).bfloat16().cuda()
        x[2, 7] = float("nan")
        found = getattr(linear, op)(x, weight).isnan()
        assert found[2].all() or op == "int4"
        assert not found[[row for row in range(rows) if row != 2]].any()


def test_bad_arguments_are_refused(linear: Linear) -> None:
    weight = linear.pack(torch.randn(64, 128).bfloat16().cuda(), torch.bfloat16)
    x, out = (torch.zeros(17, size, device="cuda", dtype=torch.bfloat16) for size in (128, 64))
    rest = None, None, None, 0, 128, True, None, None, None, 0.0, 0.0, -1
    with pytest.raises(RuntimeError, match="17 rows"):
        torch.ops.localllm.small_batch(out, x, weight.data, *rest)
    with pytest.raises(RuntimeError, match="gate is 3, -1 to 2 expected"):
        torch.ops.localllm.small_batch(out[:2], x[:2], weight.data, *rest[:-1], 3)
    with pytest.raises(RuntimeError, match="multiples of 16 expected"):
        torch.ops.localllm.small_batch(out[:2], x[:2], weight.data[:, :64].contiguous(), *rest)
    shifted = torch.zeros(1 + weight.data.numel(), device="cuda", dtype=torch.bfloat16)[1:].view_as(weight.data)
    with pytest.raises(RuntimeError, match="weight is not aligned"):
        torch.ops.localllm.small_batch(out[:2], x[:2], shifted, *rest)
    with pytest.raises(RuntimeError, match="weights of bf16"):
        torch.ops.localllm.tiled_product(out, x, weight.data, *rest[:6])
    int4 = linear.pack(copy_to(weight_of("int4", 64, 128, 64, torch.Generator()), "cuda"), torch.bfloat16)
    records = torch.empty(1 + int4.records.numel(), device="cuda", dtype=torch.int32)[1:].view_as(int4.records)
    with pytest.raises(RuntimeError, match="records is not aligned"):
        torch.ops.localllm.tiled_product(out, x, int4.data, records, None, None, 2, 64, True)
    with pytest.raises(RuntimeError, match="records or scale"):
        torch.ops.localllm.tiled_product(out, x, int4.data, None, None, None, 2, 64, True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": 3}, "format is 3"),
        ({"first": 4}, "first is 4"),
        ({"first": 56}, "first is 56, 0 to 48 expected"),
        ({"records": None}, "records or scale"),
        ({"group": 48}, "groups of 48"),
        ({"inputs": 124}, "124 inputs, a multiple of 8"),
        ({"outputs": 72}, "outputs is 72"),
        ({"shifted": 1}, "out is not aligned"),
    ],
    ids=str,
)
def test_bad_arguments_of_widen_are_refused(linear: Linear, changed: dict[str, Any], message: str) -> None:
    given = {"format": 2, "first": 0, "group": 64, "inputs": 128, "outputs": 16, "shifted": 0} | changed
    weight = linear.pack(copy_to(weight_of("int4", 64, 128, 64, torch.Generator()), "cuda"), torch.bfloat16)
    shape = given["outputs"], given["inputs"]
    memory = torch.zeros(8 + shape[0] * shape[1], device="cuda", dtype=torch.bfloat16)
    out = memory[given["shifted"] :][: shape[0] * shape[1]].view(shape)
    rest = given.get("records", weight.records), None, given["format"], given["group"], given["first"]
    with pytest.raises(RuntimeError, match=message):
        torch.ops.localllm.widen(out, weight.data, *rest)


def test_bad_arguments_of_round_groups_are_refused(linear: Linear) -> None:
    x, out = (torch.zeros(4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    with pytest.raises(RuntimeError, match="groups of 16"):
        torch.ops.localllm.round_groups(out, x, 16)
    with pytest.raises(RuntimeError, match="not aligned"):
        torch.ops.localllm.round_groups(out[:, :124].contiguous(), x[:, :124], 32)
    with pytest.raises(RuntimeError, match="x is not aligned"):
        torch.ops.localllm.round_groups(out[:, :120].contiguous(), x[:, 1:121], 32)


SIZES: dict[str, Any] = {"heads": 8, "kv_heads": 2, "dim": 64, "hidden": 256, "inner": 192, "page_size": 16}
LAYERS = [case for case in CASES if case.op == "layer.decoder" and torch.bfloat16 in case.tolerances]


@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_layer_equals_reference(linear: Linear, case: Case) -> None:
    from localllm.kernels.cuda.step import layer

    dtype = torch.bfloat16
    arguments = dict(case.make(torch.Generator().manual_seed(7), dtype))
    wide = {name: copy_to(value, "cpu", wide=True) for name, value in arguments.items()}
    expected = call_op(case, Ops().layer.decoder, wide)
    given = {name: copy_to(value, "cuda") for name, value in arguments.items()}
    ops = Ops(linear=linear)
    given |= {"layer": pack_value(ops, given["layer"], dtype), "ops": ops}
    for found, right in zip(call_op(case, layer.decoder, given), expected, strict=True):
        close(found, right, case.tolerances[dtype])


def quantised(product: Product, op: str) -> Product:
    weight = product.weight.float()
    scale = weight.abs().amax(1) / (127.0 if op == "int8" else 448.0)
    scaled = weight / scale[:, None]
    if op == "int8":
        return Product(op, Int8(scaled.round().to(torch.int8), scale), product.bias)
    return Product(op, Fp8(scaled.to(torch.float8_e4m3fn), scale[:, None], weight.shape[1]), product.bias)


@pytest.mark.parametrize("op", ["int8", "fp8"])
@pytest.mark.parametrize(
    "options", [{}, {"bias": True, "after_norms": True, "offset": 1.0, "gate": "gelu_tanh_and_mul"}]
)
def test_layer_with_tiled_products_equals_reference(linear: Linear, op: str, options: dict[str, Any]) -> None:
    from localllm.kernels.cuda.step import layer

    # Every GPU multiplies 20 rows of each format with the tiled kernels.
    case = Case("layer.decoder", "tiled", inputs([(19, 40), (1, 9)], **SIZES, **options), {}, mutates=CACHE, packs=())
    arguments = dict(case.make(torch.Generator().manual_seed(7), torch.bfloat16))
    dense = arguments["layer"]
    mlp = dense.mlp._replace(gate_up=quantised(dense.mlp.gate_up, op), down=quantised(dense.mlp.down, op))
    arguments["layer"] = replace(dense, qkv=quantised(dense.qkv, op), out=quantised(dense.out, op), mlp=mlp)
    expected = call_op(case, Ops().layer.decoder, {k: copy_to(v, "cpu", wide=True) for k, v in arguments.items()})
    given = {name: copy_to(value, "cuda") for name, value in arguments.items()}
    ops = Ops(linear=linear)
    given |= {"layer": pack_value(ops, given["layer"], torch.bfloat16), "ops": ops}
    for found, right in zip(call_op(case, layer.decoder, given), expected, strict=True):
        close(found, right, 4e-2)
