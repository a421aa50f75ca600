"""Prefill attention in CUDA C++ against the reference, on a GPU: batches of every supported shape, for the kernel with
wgmma (only on Hopper) and the kernel with mma.sync."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from localllm.kernels.gpu.properties import gpu_properties
from localllm.kernels.ops.attention import paged_attention as reference
from localllm.kernels.ops.cases.attention import CASES
from localllm.kernels.ops.cases.case import TOLERANCES

from .test_triton_attention import inputs, on_device

HOPPER = torch.cuda.is_available() and gpu_properties(torch.device("cuda")).capability == (9, 0)
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
UNTOUCHED = 7.0


@pytest.fixture(scope="module", params=["prefill", "prefill_mma"])
def library(request: pytest.FixtureRequest) -> Any:
    if request.param == "prefill" and not HOPPER:
        pytest.skip("there is no Hopper GPU")
    return pytest.importorskip(f"localllm.kernels.cuda.attention.{request.param}", exc_type=ImportError)


def with_mma(library: Any) -> bool:
    """True for the kernel with mma.sync."""
    return library.__name__.endswith("mma")


def drawn(library: Any, seed: int) -> dict[str, Any]:
    pick = random.Random(seed)
    group, kv_heads, longest = (
        pick.choice([1, 2, 3, 4, 5, 8, 16]),
        pick.choice([1, 2, 3, 8]),
        pick.choice([20, 300, 2500]),
    )
    lens = []
    for _ in range(pick.choice([1, 1, 2, 7, 40] if longest < 2500 else [1, 3])):
        queries = pick.choice([1, 2, 5, 17, 31, 32, 33, 100, 128, 257])
        lens.append((queries, queries + pick.choice([0, pick.randrange(longest)])))
    return inputs(
        lens,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        dim=pick.choice([64, 80, 96, 128, 192, 256] if with_mma(library) else [64, 128, 128]),
        page_size=pick.choice([*([1, 2] if with_mma(library) else []), 8, 16, 16, 64, 128, 256]),
        dtype=pick.choice([torch.bfloat16, torch.bfloat16, torch.float16]),
        cache=pick.choice([None, torch.float8_e4m3fn]) if with_mma(library) else None,
        sinks=pick.random() < 0.3,
        seed=seed,
        window=pick.choice([0, 0, 0, 1, 7, 63, 64, 65, 200]),
        soft_cap=pick.choice([0.0, 0.0, 2.0]),
    )


def computed(library: Any, arguments: dict[str, Any], min_queries: int = 1) -> torch.Tensor:
    """The output with upper bounds as contexts on the host. Memory that the kernel does not write is NaN."""
    rows = replace(arguments["rows"], contexts=(9999,) * len(arguments["rows"].contexts))
    out = torch.full_like(arguments["query"], UNTOUCHED)
    library.prefill(out, arguments["query"], rows, arguments["attend"], min_queries)
    return out


def check(library: Any, arguments: dict[str, Any]) -> None:
    expected = reference(**on_device(arguments, wide=True))
    found = computed(library, on_device(arguments))
    tolerance = TOLERANCES[found.dtype] * expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("seed", range(240))
def test_equals_reference(library: Any, seed: int) -> None:
    check(library, drawn(library, seed))


# The kernel does not read the cache of attention.latent.
@pytest.mark.parametrize("case", [case for case in CASES if case.op != "attention.latent"], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_supported_cases_equal_the_reference(library: Any, case: Any, dtype: torch.dtype) -> None:
    arguments = on_device(case.make(torch.Generator().manual_seed(0), dtype))
    if not library.supports(**arguments):
        pytest.skip("left to others")
    check(library, arguments)


@pytest.mark.parametrize("window", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("before", [0, 126, 127, 128, 129])
def test_lengths_near_the_edges_of_blocks_and_windows(library: Any, window: int, before: int) -> None:
    lens = [(queries, before + queries) for queries in (1, 2, 127, 128, 129, 260)]
    check(library, inputs(lens, heads=4, kv_heads=1, dim=128, window=window))
    check(library, inputs(lens, heads=4, kv_heads=4, dim=128))


def test_rows_with_fewer_queries_are_not_written(library: Any) -> None:
    arguments = on_device(inputs([(1, 70), (40, 90), (2, 9), (1, 3), (3, 600)]))
    expected = reference(**arguments)
    found = computed(library, arguments, min_queries=3)
    for own, written in ((slice(0, 1), False), (slice(1, 41), True), (slice(41, 44), False), (slice(44, 47), True)):
        if written:
            torch.testing.assert_close(found[own], expected[own], rtol=2e-2, atol=2e-2)
        else:
            assert (found[own] == UNTOUCHED).all()


@pytest.mark.parametrize("lens", [[(1, 700), (300, 300), (1, 1), (2, 90)], [(40, 90)] * 40], ids=["mixed", "prompts"])
def test_decode_rows_together_with_prefill_rows(library: Any, lens: list[tuple[int, int]]) -> None:
    from localllm.kernels.cuda.attention.paged import paged_attention

    arguments = inputs(lens, dim=96 if with_mma(library) else 128, sinks=True, window=100)
    expected, moved = reference(**on_device(arguments, wide=True)), on_device(arguments)
    assert library.supports(**moved)
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    try:
        found = paged_attention(**moved)
    finally:
        torch.use_deterministic_algorithms(False)
    tolerance = TOLERANCES[found.dtype] * expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=tolerance)


def test_a_captured_graph_computes_other_contexts(library: Any) -> None:
    arguments = on_device(inputs([(40, 2000), (9, 300), (1, 50)]))
    rows = arguments["rows"]
    computed(library, arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [computed(library, arguments) for _ in range(3)]  # each begins before the one ahead has ended
    for contexts in [(40, 9, 1), (2000, 300, 50), (129, 128, 49)]:
        rows.context_lens.copy_(torch.tensor(contexts, dtype=torch.int32))
        graph.replay()
        expected = reference(**{**arguments, "rows": replace(rows, contexts=contexts)})
        for one in found:
            torch.testing.assert_close(one, expected, rtol=2e-2, atol=2e-2)


def test_a_long_prompt(library: Any) -> None:
    """With more tiles than resident blocks, a block claims several tiles. The counters are zero afterwards."""
    arguments = inputs([(3000, 3000), (700, 2100)], heads=16, kv_heads=4, dim=128)
    check(library, arguments)
    check(library, arguments)
