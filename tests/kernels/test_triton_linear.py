"""The Triton products against the references: on a GPU, or float32 in the interpreter (test_triton_interpreted.py)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases import CASES
from localllm.kernels.ops.cases.case import TOLERANCES, Case
from localllm.kernels.ops.cases.reference_check import call_op, copy_to
from localllm.kernels.ops.linear import Fp8, Int4, Int8, Weight

from ..accelerator import INTERPRETED, triton_device

pytest.importorskip("triton")
DEVICE = triton_device()

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not DEVICE, reason="there is no GPU"),
]
SLOW = [pytest.mark.slow] if INTERPRETED else []
PRODUCTS = ("linear.dense", "linear.int8", "linear.int4", "linear.int4_wide", "linear.fp8")


def runs() -> Iterator[Any]:
    """(case, dtype of activations, whether the weight is packed). In the interpreter all but one case of each op are
    slow."""
    often: set[str] = set()
    for case in CASES:
        for dtype in case.tolerances if case.op in PRODUCTS else ():
            for packed in (False, True) if "int4" in case.op else (False,):
                if INTERPRETED and dtype == torch.bfloat16:  # which numpy does not have
                    continue
                rest = case.op in often or dtype == torch.float16 or packed != ("int4" in case.op)
                often |= set() if rest else {case.op}
                label = f"{case}-{dtype}{'-packed' * packed}"
                yield pytest.param(case, dtype, packed, id=label, marks=SLOW if rest else [])


DTYPES = [dtype for dtype in TOLERANCES if not INTERPRETED or dtype != torch.bfloat16]


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """torch.empty returns NaN and the largest integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("case", "dtype", "packed"), list(runs()))
def test_op_equals_reference(case: Case, dtype: torch.dtype, packed: bool) -> None:
    from localllm.kernels.triton import linear

    arguments = dict(case.make(torch.Generator().manual_seed(7), dtype))
    expected = call_op(case, dict(Ops())[case.op], {k: copy_to(v, "cpu", wide=True) for k, v in arguments.items()})[0]
    given = {name: copy_to(value, DEVICE) for name, value in arguments.items()}
    if packed:
        given["weight"] = linear.pack_slices([given["weight"]], len(given["weight"].data), dtype)
    found = getattr(linear, case.op.split(".")[1])(**given)
    scale = max(expected.abs().max().item() if expected.numel() else 1.0, 1e-6)
    torch.testing.assert_close(
        found.cpu().double(), expected.double(), rtol=0.0, atol=case.tolerances[dtype] * scale, equal_nan=True
    )


def weight_of(op: str, out_features: int, in_features: int, group: int, generator: torch.Generator) -> Weight:
    """A random weight with all values of its format, asymmetric if the format allows it."""
    groups = -(-in_features // group)
    scale = torch.rand(out_features, groups, generator=generator) / in_features**0.5 + 1e-4
    data = torch.randint(0, 256, (out_features, in_features), generator=generator).to(torch.uint8)
    if op == "int8":
        return Int8(data.view(torch.int8).clamp(min=-127), scale[:, 0])
    if op == "fp8":
        data[(data & 0x7F) == 0x7F] = 0  # NaN
        return Fp8(data.view(torch.float8_e4m3fn), scale, group)
    nibbles = data[:, : -(-in_features // 2)].contiguous()
    if in_features % 2:
        nibbles[:, -1] &= 15
    zero = torch.randint(0, 17, (out_features, groups), generator=generator).to(torch.uint8)
    return Int4(nibbles, scale.half(), zero, group, in_features)


def compared(op: str, weight: Weight, x: Tensor, **options: Any) -> None:
    """A product on the device, and the product of the reference in float64."""
    from localllm.kernels.triton import linear

    expected = dict(Ops())[f"linear.{op}"](x.double(), copy_to(weight, "cpu", wide=True), **options)
    if isinstance(weight, Int4):
        held: Any = linear.pack_slices([copy_to(weight, DEVICE)], len(weight.data), x.dtype)
    else:
        held = copy_to(weight, DEVICE)
    there = {name: copy_to(value, DEVICE) for name, value in options.items()}
    found, again = (getattr(linear, op)(x.to(DEVICE), held, **there) for _ in range(2))
    allowed = TOLERANCES[x.dtype] * expected.abs().max().item()
    torch.testing.assert_close(found.cpu().double(), expected.double(), rtol=0.0, atol=allowed)
    assert torch.equal(found, again), "shares of the inputs are added in one order"


SHAPES = [  # op, out_features, in_features, group: full and partial blocks; scales of 32 inputs and more; many shares
    *(("int4", 33, 256, group) for group in (32, 64)),
    ("int4", 130, 256, 128),
    ("int4_wide", 40, 600, 64),
    ("int4_wide", 3, 127, 128),
    ("fp8", 64, 512, 512),
    ("fp8", 70, 300, 96),
    ("fp8", 9, 33, 33),
    ("int8", 130, 1100, 1100),
    ("int8", 9, 33, 33),
]
DEEP = [
    *(("int4_wide", 128, 384, group) for group in (32, 64, 96, 128, 160)),
    ("int4_wide", 200, 1000, 64),
    ("int4", 40, 4100, 32),
    ("fp8", 70, 1000, 1000),
    ("fp8", 70, 512, 128),
    ("fp8", 65, 500, 96),
    ("int8", 64, 4096, 4096),
]


@pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, id=str(dtype), marks=SLOW if dtype == torch.float16 else []) for dtype in DTYPES]
)
@pytest.mark.parametrize(
    ("op", "out_features", "in_features", "group"), [*SHAPES, *(pytest.param(*shape, marks=SLOW) for shape in DEEP)]
)
def test_small_batch_of_every_shape(
    op: str, out_features: int, in_features: int, group: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(out_features * in_features)
    weight = weight_of(op, out_features, in_features, group, generator)
    for rows in (1, 16):
        compared(op, weight, torch.randn(rows, in_features, generator=generator).to(dtype))
    bias = torch.randn(out_features, generator=generator)
    compared(op, weight, torch.randn(2, in_features, generator=generator).to(dtype), bias=bias, dtype=torch.float32)


@pytest.mark.parametrize("op", ["int8", "int4", "int4_wide", "fp8"])
@pytest.mark.parametrize("rows", [1, 16])
def test_small_batch_reads_the_weight_in_place(op: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the reference nor a dequantised copy of the weight is used."""
    from localllm.kernels.triton import linear

    def refuse(*_: object, **__: object) -> Tensor:
        raise AssertionError

    for module, name in [
        (linear, "widened_product"),
        (linear.linear_int8, "int8"),
        (linear.linear_int4, "int4"),
        (linear.linear_int4, "int4_wide"),
        (linear.linear_fp8, "fp8"),
    ]:
        monkeypatch.setattr(module, name, refuse)
    generator = torch.Generator().manual_seed(rows)
    weight = copy_to(weight_of(op, 48, 256, 256 if op in ("int8", "fp8") else 64, generator), DEVICE)
    for dtype in DTYPES:
        x = torch.randn(rows, 256, generator=generator).to(DEVICE, dtype)
        assert getattr(linear, op)(x, weight).isfinite().all()


@pytest.mark.parametrize("op", ["int8", "int4", "int4_wide", "fp8"])
def test_the_reference_computes_unsupported_products(op: str) -> None:
    """float64, int8 with too many inputs for an int32 sum, and empty inputs."""
    from localllm.kernels.triton import linear, small_batch

    generator = torch.Generator().manual_seed(2)
    weight = weight_of(op, 5, 64, 64, generator)
    reference = dict(Ops())[f"linear.{op}"]
    x = torch.randn(3, 64, generator=generator).double()
    assert torch.equal(getattr(linear, op)(x, weight), reference(x, weight))
    if isinstance(weight, Int4):
        packed = linear.pack_slices([weight], 5, torch.float32)
        assert torch.equal(getattr(linear, op)(x, packed), reference(x, weight))
    if op == "int8":
        for in_features in (small_batch.MAX_IN_FEATURES, small_batch.MAX_IN_FEATURES + 256):
            wide = Int8(torch.full((2, in_features), 127, dtype=torch.int8), torch.ones(2))
            found = linear.int8(torch.ones(1, in_features, device=DEVICE), copy_to(wide, DEVICE))
            torch.testing.assert_close(found.cpu(), torch.full((1, 2), 127.0 * in_features), rtol=1e-3, atol=0.0)
        empty = Int8(torch.zeros(4, 0, dtype=torch.int8), torch.ones(4))
        assert torch.equal(linear.int8(torch.zeros(2, 0), empty, torch.ones(4)), torch.ones(2, 4))
    for shape in ((0, 64), (2, 0, 64)):
        assert getattr(linear, op)(torch.zeros(shape, device=DEVICE), copy_to(weight, DEVICE)).shape == (*shape[:-1], 5)


def test_int4_is_packed_at_once_and_in_slices() -> None:
    from localllm.kernels.triton import linear

    weight = weight_of("int4", 100, 160, 64, torch.Generator().manual_seed(4))
    assert isinstance(weight, Int4)

    def piece(start: int, stop: int) -> Int4:
        return weight._replace(**{name: getattr(weight, name)[start:stop] for name in ("data", "scale", "zero")})

    slices = linear.pack_slices(iter([piece(0, 64), piece(64, 96), piece(96, 100)]), 100, torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(linear.plain(slices)[:3], weight[:3], strict=True))
    assert slices[2:] == (64, 160, False)


HALF_TYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize(("op", "group"), [("int4", 64), ("int4_wide", 128), ("int4_wide", 256), ("fp8", 128)])
def test_tiled_products(op: str, group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows and two tiles of rows, with padding outputs and a bias, read the weight in place; more rows widen it."""
    from localllm.kernels.triton import linear, tiled

    generator = torch.Generator().manual_seed(group)
    weight = weight_of(op, 70, 256, group, generator)
    many = torch.randn(tiled.MAX_ROWS + 1, 256, generator=generator).to(dtype)
    compared(op, weight, many)

    def refuse(*_: object, **__: object) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(linear, "widened_product", refuse)
    bias = torch.randn(70, generator=generator)
    for rows in (3, 65):
        compared(op, weight, many[:rows], bias=bias, dtype=torch.float32)


@pytest.mark.parametrize("group", [64, 128])
def test_int4_packed_by_half_is_the_same_weight(group: int) -> None:
    """Its data is permuted. The float32 product of 1 row, which no tiled kernel computes, is the same too."""
    from localllm.kernels.triton import linear

    generator = torch.Generator().manual_seed(group)
    weight = weight_of("int4", 24, 256, group, generator)
    assert isinstance(weight, Int4)
    packed = linear.pack_slices([weight], 24, torch.bfloat16)
    assert packed.is_by_half
    assert not torch.equal(packed.data, weight.data)
    assert torch.equal(linear.plain(packed).data, weight.data)
    x = torch.randn(1, 256, generator=generator)
    found = linear.int4_wide(x.to(DEVICE), copy_to(packed, DEVICE)).cpu().double()
    expected = x.double() @ weight.dense().double().t()
    torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-5 * expected.abs().max().item())
    assert not linear.pack_slices([weight], 24, torch.bfloat16, of_experts=True).is_by_half


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("rows", [3, 40])
def test_weights_packed_for_the_cuda_library(group: int, rows: int) -> None:
    """Nibbles transposed in each 64 bytes, scales in blocks of eight outputs (kernels/cuda/products/linear.py)."""
    from localllm.kernels.triton import linear

    from .cuda_layout import transposed

    out_features, in_features, generator = 72, 384, torch.Generator().manual_seed(group)
    weight = weight_of("int4", out_features, in_features, group, generator)
    assert isinstance(weight, Int4)
    x = torch.randn(rows, in_features, generator=generator)
    found = linear.product(x.to(DEVICE), transposed(weight, DEVICE), None, None)
    expected = x.double() @ weight.dense().double().t()
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0.0, atol=2e-5 * expected.abs().max().item())


def test_no_share_is_empty() -> None:
    from localllm.kernels.triton.small_batch import shares_of

    for blocks in (1, 2, 30, 64, 224, 1002):
        for steps in (1, 2, 3, 4, 7, 8, 31, 112):
            for processors in (1, 20, 84, 132):
                shares = shares_of(blocks, steps, processors)
                assert 1 <= shares <= max(1, steps // 2)
                assert shares == 1 or blocks * shares < 4 * processors


@pytest.mark.parametrize("op", ["int8", "int4", "int4_wide", "fp8"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_nan_affects_only_its_row(op: str, broken: float) -> None:
    from localllm.kernels.triton import linear

    case = next(case for case in CASES if case.op == f"linear.{op}" and str(case).endswith("33-rows"))
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    given = {k: copy_to(v, DEVICE) for k, v in case.make(torch.Generator().manual_seed(7), dtype).items()}
    given["x"][5, 3] = broken
    found = getattr(linear, op)(**given).isfinite()
    assert not found[5].any()
    assert found[:5].all()
    assert found[6:].all()


def test_rounding_equals_the_reference_exactly() -> None:
    """Ties round equally, whatever the compiler does with the additions that round."""
    from localllm.kernels.ops.linear_int8 import rounded
    from localllm.kernels.triton.round_rows import as_rounded, round_rows

    x = torch.randn(32, 2500, generator=torch.Generator().manual_seed(3))
    x[3], x[5] = 0.0, torch.arange(2500) * 0.5
    x[7, :254], x[7, 254:] = torch.arange(-127, 127) + 0.5, 127.0
    whole, scale = rounded(x)
    given = x.to(DEVICE)
    for found, right in zip(round_rows(given), (whole, scale[:, 0]), strict=True):
        assert torch.equal(found.cpu().float(), right)
    for group in (32, 128):
        padded = torch.nn.functional.pad(x, (0, -2500 % group)).unflatten(-1, (-1, group))
        whole, scale = rounded(padded)
        assert torch.equal(as_rounded(given, group).cpu(), (whole * scale).flatten(-2)[:, :2500])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_sums_that_were_not_rounded(dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 outputs of 16-bit inputs. In the interpreter, a float32 product stands in for torch's mixed product."""
    from localllm.kernels.triton import linear
    from localllm.kernels.triton.target import Target

    if INTERPRETED:
        device = SimpleNamespace(target=Target(float_sums=True))
        monkeypatch.setattr(linear, "device_properties", lambda _: device)
        monkeypatch.setattr(linear, "_sums", lambda x, weights: x.float() @ weights.float().t())
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(2, 3, 256, generator=generator).to(dtype)
    weight = torch.randn(96, 256, generator=generator).to(dtype)
    shift = torch.randn(96, generator=generator).to(dtype) if bias else None
    expected = x.double() @ weight.double().t() + (shift.double() if shift is not None else 0.0)
    on_device = None if shift is None else shift.to(DEVICE)
    out = linear.dense(x.to(DEVICE), weight.to(DEVICE), on_device, torch.float32)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=1e-4)
