"""Triton's attention against the reference: in the interpreter, or on a GPU."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from localllm.kernels.ops.attention import Attend, Rows, latent_attention
from localllm.kernels.ops.attention import paged_attention as reference
from localllm.kernels.ops.cases.attention import CASES
from localllm.kernels.ops.cases.case import TOLERANCES
from localllm.kernels.ops.cases.reference_check import copy_to
from localllm.kernels.triton import attention, target
from localllm.kernels.triton.attention_plan import SHORT_QUERIES, plan

from ..accelerator import INTERPRETED, triton_device

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")  # Triton's own

DEVICE = triton_device()
interpreted = pytest.mark.skipif(not INTERPRETED, reason="test_triton_interpreted.py runs it")
real = [pytest.mark.real, pytest.mark.skipif(not DEVICE, reason="there is no GPU")]
RANDOM = 240  # batches
KINDS = 48  # number of different kernels among them, all of which must be compiled
SLOW = [pytest.mark.slow]
OFTEN = ("mixed", "sinks-soft-cap", "prompt", "window", "odd-dims")  # interpreted in make test; the others are slow


def on_device(arguments: Mapping[str, Any], wide: bool = False) -> dict[str, Any]:
    """The tensors on the device; floats in float64 if `wide`."""
    return {name: copy_to(value, DEVICE, wide) for name, value in arguments.items()}


def with_cache(arguments: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The arguments with a cache of this dtype."""
    keys, values = (pages.to(dtype) for pages in arguments["attend"][:2])
    return {**arguments, "attend": arguments["attend"]._replace(key_pages=keys, value_pages=values)}


def check(arguments: Mapping[str, Any], tolerance: float, rows: Rows | None = None) -> None:
    """`rows`: rows for the kernels, if they differ from those of the reference."""
    is_latent = "pages" in arguments
    expected = (latent_attention if is_latent else reference)(**on_device(arguments, wide=True))
    attend = attention.latent_attention if is_latent else attention.paged_attention
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    try:
        actual = attend(**on_device({**arguments, "rows": rows or arguments["rows"]}))
    finally:
        torch.use_deterministic_algorithms(False)
    scale = expected.abs().max().item()
    torch.testing.assert_close(actual.double(), expected, rtol=0.0, atol=tolerance * scale)
    assert all(not zeros.any() for zeros in counters()), "split tiles are counted from zero"


def counters() -> list[torch.Tensor]:
    """The counters of the current stream, in every size that a batch may need."""
    device = torch.device(DEVICE, 0) if DEVICE != "cpu" else torch.device(DEVICE)
    return [target.counters(device, 1 << bits) for bits in range(12, 17)]


def inputs(
    lens: list[tuple[int, int]],  # queries and context length of each row
    heads: int = 8,
    kv_heads: int = 2,
    dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    cache: torch.dtype | None = None,
    sinks: bool = False,
    seed: int = 0,
    **options: float,
) -> dict[str, Any]:
    """Arguments of attention. Values that no row may read are NaN."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-context // page_size) for _, context in lens]
    ids = (torch.randperm(sum(needed), generator=generator) + 1).to(torch.int32)
    pages = torch.randn(2, len(ids) + 1, page_size, kv_heads, dim, generator=generator)
    pages[:, 0] = float("nan")
    table = torch.zeros(len(lens), max(needed) + 3, dtype=torch.int32)
    for row, (own, (_, context)) in enumerate(zip(ids.split(needed), lens, strict=True)):
        table[row, : len(own)] = own
        pages[:, own[-1].item(), (context - 1) % page_size + 1 :] = float("nan")
    queries, contexts = zip(*lens, strict=True)
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    held = pages.to(dtype).to(cache or dtype)
    return {
        "query": torch.randn(sum(queries), heads, dim, generator=generator).to(dtype),
        "rows": Rows(starts, torch.tensor(contexts, dtype=torch.int32), table, queries, contexts),
        "attend": Attend(
            *(held[0], held[1], dim**-0.5),
            sinks=torch.randn(heads, generator=generator) * 2.0 if sinks else None,
            **options,
        ),
    }


def latents(
    lens: list[tuple[int, int]], heads: int = 16, rank: int = 512, start: int = 64, seed: int = 0, **more: Any
) -> dict[str, Any]:
    """Arguments of latent attention. Values that no row may read are NaN."""
    arguments = inputs(lens, heads, 1, start + rank, seed=seed, **more)
    query, rows, attend = arguments["query"], arguments["rows"], arguments["attend"]
    return {"query": query, "pages": (attend.key_pages,), "rows": rows, "scale": attend.scale, "start": start}


def drawn(seed: int) -> dict[str, Any]:
    """A batch with random lengths, for one of KINDS kernels."""
    pick = random.Random(seed % KINDS)
    group, kv_heads = pick.choice([1, 2, 3, 4, 5, 8, 16]), pick.choice([1, 2, 3, 8])
    shape = {
        "heads": group * kv_heads,
        "kv_heads": kv_heads,
        "dim": pick.choice([1, 16, 37, 64, 64, 80, 128, 128, 128, 192, 256]),
        "page_size": pick.choice([1, 3, 16, 16, 64, 128]),
        "dtype": pick.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]),
        "window": pick.choice([0, 0, 0, 1, 7, 63, 64, 65, 200]),
        "soft_cap": pick.choice([0.0, 0.0, 2.0]),
        "sinks": pick.random() < 0.3,
        "seed": seed,
    }
    pick = random.Random(seed)
    longest = pick.choice([20, 300, 3000])
    lens = []
    for _ in range(pick.choice([1, 1, 2, 7, 40] if longest < 3000 else [1, 3])):
        queries = pick.choice([1, 1, 1, 2, 4, 5, 17, 100] if pick.random() < 0.5 else [1])
        lens.append((queries, queries + pick.randrange(longest)))
    return {**shape, "lens": lens}


# Interpreted


@interpreted
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case), marks=[] if case.label in OFTEN else [pytest.mark.slow]) for case in CASES],
)
def test_case_interpreted(case: Any) -> None:
    dtype = torch.float16 if case.label in ("mixed", "sinks-soft-cap", "prompt") else torch.float32
    check(case.make(torch.Generator().manual_seed(7), dtype), case.tolerances[dtype])


@interpreted
@pytest.mark.parametrize("seed", [4, 5])
def test_any_shape_interpreted(seed: int) -> None:
    shape = {**drawn(seed), "dtype": torch.float32, "dim": 24, "heads": 4, "kv_heads": 2}
    check(inputs(**{**shape, "lens": [(min(q, 9), 60 + q) for q, _ in shape["lens"][:3]]}), 2e-5)


@interpreted
@pytest.mark.parametrize(
    "lens", [[(1, 70), (1, 3)], pytest.param([(1, 300)], marks=SLOW), pytest.param([(7, 40), (2, 9)], marks=SLOW)]
)
def test_latent_cache_interpreted(lens: list[tuple[int, int]]) -> None:
    """24 heads are computed in two groups of 12."""
    check(latents(lens, heads=24, rank=64, start=12, dtype=torch.float32), 2e-5)


@interpreted
def test_fp8_cache_of_a_device_that_does_not_convert_it() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = every[every.isfinite()]
    arguments = inputs([(1, 254)], 1, 1, 16, dtype=torch.float32, cache=torch.float8_e4m3fn)
    slots = arguments["rows"].page_table[0, torch.arange(254) // 16].long() * 16 + torch.arange(254) % 16
    arguments["attend"].value_pages.flatten(0, 1)[slots] = (
        values.view(-1, 1, 1).expand(-1, 1, 16).to(torch.float8_e4m3fn)
    )
    actual = attention.paged_attention(**on_device(arguments))
    plain = with_cache(arguments, torch.float32)
    torch.testing.assert_close(actual, reference(**plain), rtol=0.0, atol=1e-3)  # the values are up to 448


# On a device


class TestOnDevice:
    pytestmark = [] if INTERPRETED else real

    @pytest.fixture(autouse=True)
    def _not_interpreted(self) -> None:
        if INTERPRETED:
            pytest.skip("interpreted")

    @pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_case(self, case: Any, dtype: torch.dtype) -> None:
        check(case.make(torch.Generator().manual_seed(7), dtype), case.tolerances[dtype])

    @pytest.mark.parametrize("seed", range(RANDOM))
    def test_any_shape(self, seed: int) -> None:
        shape = drawn(seed)
        check(inputs(**shape), TOLERANCES[shape["dtype"]])

    @pytest.mark.parametrize("queries", [1, 3, 40])
    @pytest.mark.parametrize("context", [127, 128, 129])
    def test_context_about_the_window(self, context: int, queries: int) -> None:
        check(inputs([(queries, context), (queries, context + 300)], window=128), TOLERANCES[torch.bfloat16])

    @pytest.mark.parametrize("rows", [1, 5, 130])
    def test_contexts_may_be_upper_bounds(self, rows: int) -> None:
        arguments = inputs([(1, 1 + 37 * row % 900) for row in range(rows)])
        upper_bounds = replace(on_device(arguments)["rows"], contexts=(4096,) * rows)
        check(arguments, TOLERANCES[torch.bfloat16], upper_bounds)

    @pytest.mark.parametrize("queries", [1, 130])
    def test_fp8_cache(self, queries: int) -> None:
        arguments = inputs([(queries, 500), (1, 77)], dtype=torch.bfloat16, cache=torch.float8_e4m3fn)
        expected = reference(**on_device(with_cache(arguments, torch.bfloat16), wide=True))
        actual = attention.paged_attention(**on_device(arguments))
        torch.testing.assert_close(actual.double(), expected, rtol=0.0, atol=2e-2)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize("heads", [4, 16, 40, 128])
    @pytest.mark.parametrize("lens", [[(1, 3000)], [(1, 1 + 37 * row) for row in range(30)], [(130, 700), (3, 90)]])
    def test_latent_cache(self, lens: list[tuple[int, int]], heads: int, dtype: torch.dtype) -> None:
        check(latents(lens, heads, dtype=dtype), TOLERANCES[dtype])

    @pytest.mark.parametrize("rows", [1, 40])
    def test_contexts_of_latents_may_be_upper_bounds(self, rows: int) -> None:
        arguments = latents([(1, 1 + 37 * row % 900) for row in range(rows)])
        upper_bounds = replace(on_device(arguments)["rows"], contexts=(4096,) * rows, exact=False)
        check(arguments, TOLERANCES[torch.bfloat16], upper_bounds)

    @pytest.mark.parametrize("queries", [1, 300])
    def test_queries_are_a_view_of_qkv(self, queries: int) -> None:
        arguments = on_device(inputs([(queries, 400), (1, 30)]))
        among = torch.full((queries + 1, 12, 64), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        among[:, :8] = arguments["query"]
        expected = attention.paged_attention(**arguments)
        assert torch.equal(attention.paged_attention(**{**arguments, "query": among[:, :8]}), expected)

    def test_a_captured_graph_computes_other_contexts(self) -> None:
        arguments = on_device(inputs([(1, 2000)] * 6))
        rows = arguments["rows"]
        attention.paged_attention(**arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = attention.paged_attention(**arguments)
        for contexts in [(1, 64, 65, 2000, 3, 700), (1,) * 6, (1999,) * 6]:
            rows.context_lens.copy_(torch.tensor(contexts, dtype=torch.int32))
            graph.replay()
            again = replace(rows, contexts=contexts)
            assert torch.equal(actual, attention.paged_attention(**{**arguments, "rows": again}))
            expected = reference(**{**arguments, "rows": again})
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


# The plan


def test_decode_is_one_launch_for_any_contexts() -> None:
    (launch,) = plan((1,) * 40, (9,) * 40, 4, 8, 128, SHORT_QUERIES, 132)
    assert (launch.kernel, launch.queries, launch.count, launch.tiles) == ("decode", 1, 40, None)


def test_plan_covers_every_query_once() -> None:
    query_lens, contexts = (1, 300, 3, 5, 77), (50, 900, 3, 6, 1000)
    few, many = plan(query_lens, contexts, 4, 8, 128, SHORT_QUERIES, 10)
    assert (few.kernel, few.queries, few.count) == ("decode", 4, 5)
    assert many.kernel == "prefill"
    assert many.tiles is not None
    covered = {
        (row, first + i) for row, first in many.tiles for i in range(many.queries) if first + i < query_lens[row]
    }
    assert covered == {(row, q) for row, own in enumerate(query_lens) if own > SHORT_QUERIES for q in range(own)}
    ends = [contexts[row] - query_lens[row] + first for row, first in many.tiles]
    assert ends == sorted(ends, reverse=True)


def test_plan_splits_prompts_that_do_not_fill_the_device() -> None:
    (launch,) = plan((128,), (8192,), 4, 8, 128, SHORT_QUERIES, 132)
    assert (launch.kernel, launch.count) == ("decode", 4)


@pytest.mark.parametrize("shared", [48 << 10, 64 << 10, 99 << 10, 163 << 10, 227 << 10])
def test_tiles_fit_the_device_or_tiling_is_none(shared: int) -> None:
    device = attention.Device(132, shared)
    for dim, group, dtype in itertools.product((2, 64, 80, 128, 256, 512), (1, 3, 8, 16, 64, 128), TOLERANCES):
        shapes = {queries: attention.shape(queries * group, queries, dim, dtype, device) for queries in range(1, 129)}
        actual = attention.tiling(group, dim, dtype, device)
        if actual is None:
            assert not shapes[1].fits(dtype, device)
            continue
        lines, short_queries = actual
        assert 1 <= short_queries <= SHORT_QUERIES
        for queries in (short_queries, max(1, lines // group)):
            assert shapes[queries].shared(dtype, device) <= shared
        if shared >= 99 << 10 and group * dim <= 2048 and dtype != torch.float32:
            assert short_queries == SHORT_QUERIES, "as models have them"


@pytest.mark.parametrize("shared", [48 << 10, 64 << 10, 99 << 10, 163 << 10, 227 << 10])
def test_tiles_of_latents_fit_the_device_or_tiling_is_none(shared: int) -> None:
    device = attention.Device(132, shared)
    for group, rank, dtype in itertools.product((1, 5, 12, 16), (64, 256, 512), TOLERANCES):
        actual = attention.tiling(group, rank, dtype, device, 64)
        if actual is None:
            assert dtype == torch.float32 or shared < 99 << 10, "models have such tiles"
            continue
        lines, short_queries = actual
        for queries in (short_queries, max(1, lines // group)):
            blocks = attention.shape(queries * group, queries, rank, dtype, device, 64)
            assert blocks.shared(dtype, device) <= shared


def test_the_reference_computes_shapes_without_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "device_properties", lambda _: attention.Device(8, 48 << 10))
    arguments = inputs([(1, 9), (7, 12)], heads=2, kv_heads=1, dim=512, dtype=torch.float32)
    expected = reference(**arguments)
    calls = []
    monkeypatch.setattr(attention.reference, "paged_attention", lambda *_: calls.append(1) or expected)
    assert attention.paged_attention(**arguments) is expected
    assert calls == [1]
