"""The CUDA kernels against the references, on a CUDA device."""

from __future__ import annotations

import importlib
import random
import re
from functools import partial
from typing import Any

import pytest
import torch

from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases import CASES
from localllm.kernels.ops.cases.case import Case
from localllm.kernels.ops.cases.kv import TARGET
from localllm.kernels.ops.cases.reference_check import call_op, copy_to
from localllm.kernels.ops.kv import KV, Append
from localllm.kernels.ops.linear import Linear

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

OPS = {
    *("norm.rms", "norm.add_rms", "rope.neox", "rope.interleaved"),
    *("kv.store", "kv.copy_pages", "kv.append", "linear.embedding"),
    *("activation.silu_and_mul", "activation.gelu_and_mul", "activation.gelu_tanh_and_mul"),
}
RUNS = [(case, dtype) for case in CASES if case.op in OPS for dtype in case.tolerances]


@pytest.fixture(scope="module")
def ops() -> Ops:
    importlib.import_module("localllm.kernels.cuda")
    from localllm.kernels.compiled import embedding
    from localllm.kernels.compiled.ops import ACTIVATION, NORM, ROPE
    from localllm.kernels.cuda.layers import kv

    return Ops(
        norm=NORM,
        activation=ACTIVATION,
        rope=ROPE,
        linear=Linear(embedding=embedding.embedding),
        kv=KV(kv.store, kv.copy_pages, kv.append),
    )


@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=[f"{case}-{dtype}" for case, dtype in RUNS])
def test_op_equals_reference(ops: Ops, case: Case, dtype: torch.dtype) -> None:
    arguments = dict(case.make(torch.Generator().manual_seed(7), dtype))
    expected = call_op(case, dict(Ops())[case.op], {k: copy_to(v, "cpu", wide=True) for k, v in arguments.items()})
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    try:
        found = call_op(case, dict(ops)[case.op], {name: copy_to(value, "cuda") for name, value in arguments.items()})
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(found, expected, strict=True):
        scale = other.abs().max().item() if other.numel() else 1.0
        tolerance = case.tolerances[dtype] * max(scale, 1e-6)
        torch.testing.assert_close(one.cpu().double(), other.double(), rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("dim", [1, 33, 4096, 8192, 20000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_of_every_width(ops: Ops, dim: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, dim, device="cuda").to(dtype), torch.randn(dim, device="cuda").to(dtype)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 8e-3}[dtype]
    reference = Ops().norm.rms(x.double(), weight.double(), 1e-5)
    torch.testing.assert_close(ops.norm.rms(x, weight, 1e-5).double(), reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "dim"), [(300, 4096), (600, 4096), (3000, 1024), (3000, 1032), (5000, 97), (700, 9000)]
)
def test_norms_of_many_rows(ops: Ops, rows: int, dim: int, dtype: torch.dtype) -> None:
    """With many rows, each row has fewer threads."""
    x, stream, weight = (torch.randn(*size, device="cuda").to(dtype) for size in ((rows, dim), (rows, dim), (dim,)))
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
    expected, summed = Ops().norm.add_rms(x.double(), stream.double(), weight.double(), 1e-5)
    found, after = ops.norm.add_rms(x, stream, weight, 1e-5)
    torch.testing.assert_close(after.double(), summed, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.double(), expected, rtol=2 * tolerance, atol=2 * tolerance)


def test_strided_heads(ops: Ops) -> None:
    qkv = torch.randn(7, 12, 64, device="cuda").bfloat16()
    key, weight = qkv[:, 8:10], torch.randn(64, device="cuda").bfloat16()
    expected = Ops().norm.rms(key, weight, 1e-6)
    torch.testing.assert_close(ops.norm.rms(key, weight, 1e-6), expected, rtol=2e-2, atol=2e-2)


def test_slots_beyond_the_cache_are_skipped(ops: Ops) -> None:
    pages = torch.zeros(2, 4, 4, 2, 16, device="cuda")
    key = torch.ones(3, 2, 16, device="cuda")
    ops.kv.store(key, key, pages[0], pages[1], torch.tensor([-1, 5, 16], device="cuda"))
    torch.cuda.synchronize()
    assert pages.sum().item() == 2 * 32
    assert pages[0].view(-1, 2, 16)[5].sum().item() == 32


FEW_TOKENS = 250  # seeds


def random_append(seed: int) -> dict[str, Any]:
    """Arguments of kv.append in a random shape. Half of the shapes fit into vectors."""
    rng = random.Random(seed)
    dim = rng.choice([32, 64, 80, 96, 128, 192, 256]) if seed % 2 else rng.randint(1, 300)
    heads, kv_heads, tokens = rng.randint(1, 9), rng.randint(1, 4), rng.randint(1, 40)
    if seed >= FEW_TOKENS:  # of whose heads a warp takes several
        tokens = 40_000 // (heads + 2 * kv_heads)
    half = rng.choice([dim // 2, dim // 4, rng.randint(0, dim // 2)])
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    cache = rng.choice([dtype, dtype, torch.float8_e4m3fn, torch.float16])
    generator = torch.Generator().manual_seed(seed)
    angle = torch.rand(tokens, half, generator=generator) * 100.0
    norms = torch.randn(2, dim, generator=generator).to(rng.choice([dtype, torch.float32]))
    pages = torch.randn(2, max(12, tokens // 4 + 1), 4, kv_heads, dim, generator=generator).to(cache)
    return {
        "qkv": torch.randn(tokens, heads + 2 * kv_heads, dim, generator=generator).to(dtype),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "slots": torch.randperm(4 * pages.shape[1], generator=generator)[:tokens],
        "target": Append(
            *pages,
            rng.choice(["neox", "interleaved"]),
            *(norms if seed % 3 else (None, None)),
            1e-6,
            float(seed % 2),
        ),
    }


@pytest.mark.parametrize("seed", range(FEW_TOKENS + 8))
def test_append_of_any_shape(ops: Ops, seed: int) -> None:
    case = Case("kv.append", "random", lambda *_: {}, mutates=TARGET)
    arguments = random_append(seed)
    expected = call_op(case, Ops().kv.append, {k: copy_to(v, "cpu", wide=True) for k, v in arguments.items()})
    found = call_op(case, ops.kv.append, {name: copy_to(value, "cuda") for name, value in arguments.items()})
    steps = {torch.float8_e4m3fn: 2**-4, torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-19}
    for one, other in zip(found, expected, strict=True):
        if one.dtype == torch.float8_e4m3fn:
            other = other.clamp(-448.0, 448.0)
        step = steps[one.dtype]
        if arguments["target"].key_pages.dtype not in (arguments["qkv"].dtype, torch.float8_e4m3fn):
            step = max(step, 4 * steps[arguments["qkv"].dtype])  # the parts, each of which rounds
        torch.testing.assert_close(one.cpu().double(), other, rtol=step, atol=step * max(1.0, other.abs().max() / 64))


def test_store_into_float8_saturates(ops: Ops) -> None:
    key = torch.tensor([1e4, -1e4, 1.0, 0.3]).repeat(8).view(1, 2, 16).to("cuda", torch.bfloat16)
    pages = torch.zeros(2, 1, 4, 2, 16, device="cuda").to(torch.float8_e4m3fn)
    ops.kv.store(key, key, pages[0], pages[1], torch.tensor([2], device="cuda"))
    assert pages[0].float().view(4, -1)[2, :3].tolist() == [448.0, -448.0, 1.0]
    assert pages[1].float().view(4, -1)[2, 3].item() == 0.3125
    assert (pages[0].float().view(4, -1)[[0, 1, 3]] == 0).all()


def refused() -> list[tuple[str, tuple[Any, ...], str]]:
    """(op, arguments, text of the error)."""
    f = partial(torch.zeros, device="cuda")
    pages, slots = f(3, 2, 1, 4), f(2, dtype=torch.int32)
    return [
        ("rms_norm", (f(2, 8), f(2, 8), f(7), 1e-6, 0.0), "rms_norm: weight has shape [7], [8] expected"),
        ("rms_norm", (f(1, 8).expand(2, 8), f(2, 8), f(8), 1e-6, 0.0), "out is an output, but its rows overlap"),
        ("rms_norm", (f(2, 8), f(2, 8), torch.ones(8), 1e-6, 0.0), "weight is not on a CUDA device"),
        ("rms_norm", (torch.ones(2, 8), f(2, 8), f(8), 1e-6, 0.0), "out is not on a CUDA device"),
        ("gate", (f(2, 4), f(2, 8), 3), "gate: kind is 3, 0 to 2 expected"),
        ("rope", (f(2, 1, 6), f(2, 4), f(2, 4), 0), "rope: cos rotates 8 dimensions, but heads have 6"),
        ("rope", (f(2, 1, 8), f(2, 4), f(2, 4), 2), "rope: rotation is 2, 0 to 1 expected"),
        ("store", (f(2, 1, 4), f(2, 1, 4), pages, pages, slots), "slots is int32, int64 expected"),
        ("copy_cache_pages", (f(1, 3, 4), slots.long(), f(3).long()), "targets has shape [3], [2] expected"),
        *(("prefill_attention_mma", arguments, text) for arguments, text in refused_attention()),
    ]


def refused_attention() -> list[tuple[tuple[Any, ...], str]]:
    """(arguments, text of the error) of prefill_attention_mma."""

    def arguments(dim: int = 64, page: int = 4, heads: int = 2, tile_rows: int = 64) -> tuple[Any, ...]:
        query = torch.zeros(5, heads, dim, device="cuda", dtype=torch.bfloat16)
        pages = torch.zeros(2, 3, page, 1, dim, device="cuda", dtype=torch.bfloat16)
        starts = torch.tensor([0, 5], device="cuda", dtype=torch.int32)
        table = torch.zeros(1, 3, device="cuda", dtype=torch.int32)
        tensors = torch.empty_like(query), query, pages[0], pages[1], starts, starts[1:], table, None
        return *tensors, 1.0, 0, 0.0, 1, tile_rows, 1

    return [
        (arguments(dim=112), "16-bit heads of 64, 80, 96, 128, 192 or 256 expected"),
        (arguments(page=3), "pages of 3 positions, a power of two expected"),
        (arguments(heads=65), "65 heads for 1 kv heads"),
        (arguments(tile_rows=96), "tiles of 96 rows for heads of 64"),
        (arguments(dim=256, tile_rows=128), "tiles of 128 rows for heads of 256"),
    ]


def test_bad_arguments_are_refused_by_name(ops: Ops) -> None:
    for op, arguments, message in refused():
        with pytest.raises(RuntimeError, match=re.escape(message)):
            getattr(torch.ops.localllm, op)(*arguments)


def test_library_plans_for_the_limits_of_the_gpu(ops: Ops) -> None:
    """The limits that LOCALLLM_DEV_CUDA_… set reach the plans of the library."""
    package = importlib.import_module("localllm.kernels.cuda")
    fits = torch.ops.localllm.small_batch_fits.default
    product = 0, 16, 4096, 4096, 8192, 0, 4096, False, False  # device, rows, sizes of a bf16 weight, group, not fused
    limit = torch.ops.localllm.limit_gpu.default
    assert fits(*product)
    try:
        limit(8, 0, 16, 4096)
        assert not fits(*product)
        with pytest.raises(RuntimeError, match="limit_gpu: processors is -1"):
            limit(8, 0, -1, 0)
    finally:
        package._limit_gpu()
    assert fits(*product)
