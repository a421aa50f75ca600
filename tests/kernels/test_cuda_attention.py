"""Decode attention in CUDA C++ against the reference, on a CUDA device: batches of every supported shape."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from localllm.kernels.ops.attention import paged_attention as reference
from localllm.kernels.ops.cases.case import TOLERANCES

from .test_triton_attention import inputs, on_device

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture(scope="module")
def attention() -> Any:
    library = pytest.importorskip("localllm.kernels.cuda.attention.paged", exc_type=ImportError)
    return library.paged_attention


def drawn(seed: int) -> dict[str, Any]:
    pick = random.Random(seed)
    group, kv_heads, longest = pick.choice([1, 2, 3, 4, 5, 8]), pick.choice([1, 2, 3, 8]), pick.choice([20, 300, 3000])
    rows = pick.choice([1, 1, 2, 7, 40, 150] if longest < 3000 else [1, 3])
    return inputs(
        [(1, 1 + pick.randrange(longest)) for _ in range(rows)],
        heads=group * kv_heads,
        kv_heads=kv_heads,
        dim=pick.choice([64, 80, 96, 128, 192, 256]),
        page_size=pick.choice([1, 16, 64, 128]),
        dtype=pick.choice([torch.bfloat16, torch.float16]),
        sinks=pick.random() < 0.3,
        seed=seed,
        window=pick.choice([0, 0, 0, 1, 7, 63, 64, 65, 200]),
        soft_cap=pick.choice([0.0, 0.0, 2.0]),
        cache=pick.choice([None, None, torch.float8_e4m3fn]),
    )


@pytest.mark.parametrize("seed", range(300))
def test_decode_equals_reference(attention: Any, seed: int) -> None:
    arguments = drawn(seed)
    expected = reference(**on_device(arguments, wide=True))
    moved = on_device(arguments)
    bounds = replace(moved["rows"], contexts=(9999,) * len(moved["rows"].contexts))
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    try:
        found = attention(**{**moved, "rows": bounds})
    finally:
        torch.use_deterministic_algorithms(False)
    tolerance = TOLERANCES[found.dtype] * expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=tolerance)
    assert torch.equal(attention(**moved), found), "the same sums in the same order, and counters back at zero"


def test_rows_with_one_query_and_with_many(attention: Any) -> None:
    arguments = inputs([(1, 90), (40, 200)])
    expected = reference(**on_device(arguments, wide=True))
    torch.testing.assert_close(attention(**on_device(arguments)).double(), expected, rtol=0.0, atol=2e-2)


@pytest.mark.parametrize("lens", [[(1, 90), (1, 7)], [(1, 90), (40, 200)], [(3, 20)]], ids=["decode", "mixed", "few"])
@pytest.mark.parametrize("dim", [128, 37])
def test_attention_writes_to_out(attention: Any, lens: list[tuple[int, int]], dim: int) -> None:
    arguments = on_device(inputs(lens, dim=dim))
    place = torch.full(arguments["query"].shape, float("nan"), dtype=arguments["query"].dtype, device="cuda")
    assert attention(**arguments, out=place) is place
    assert torch.equal(place, attention(**arguments))


def test_a_captured_graph_computes_other_contexts(attention: Any) -> None:
    arguments = on_device(inputs([(1, 2000)] * 6))
    rows = arguments["rows"]
    attention(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [attention(**arguments) for _ in range(3)]  # each begins before the one ahead has ended
    for contexts in [(1, 64, 65, 2000, 3, 700), (1,) * 6, (1999,) * 6]:
        rows.context_lens.copy_(torch.tensor(contexts, dtype=torch.int32))
        graph.replay()
        expected = reference(**{**arguments, "rows": replace(rows, contexts=contexts)})
        for one in found:
            torch.testing.assert_close(one, expected, rtol=2e-2, atol=2e-2)
