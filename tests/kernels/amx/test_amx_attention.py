"""Attention with AMX tiles against float64. Pages are in random order, and memory that must not be read is NaN."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from localllm.kernels.ops.attention import Attend, Rows, paged_attention
from localllm.kernels.ops.cases.reference_check import copy_to

MARK = 7.0  # the harness writes this value for a row that the AVX-512 lane must compute


def run(tiles: ctypes.CDLL, workers: int, arguments: dict, stride: int = 0, start: int = 0) -> Tensor:
    """`start`: the number of dimensions that a key has and a value has not."""
    query, rows, attend = arguments["query"], arguments["rows"], arguments["attend"]
    tokens, heads, dim = query.shape
    room = torch.full((tokens, heads * dim + stride), torch.nan, dtype=torch.bfloat16)
    room[:, : heads * dim] = query.flatten(1)
    out = torch.full((tokens, heads, dim - start), torch.nan, dtype=torch.bfloat16)
    tensors = (
        out,
        room,
        attend.key_pages,
        attend.value_pages,
        rows.row_starts,
        rows.context_lens,
        rows.page_table,
        attend.sinks,
    )
    numbers = (
        len(rows.query_lens),
        tokens,
        heads,
        attend.kv_heads,
        dim,
        dim - start,
        room.stride(0),
        attend.page_size,
        rows.page_table.shape[1],
        attend.window,
    )
    tiles.run_attention(
        *(ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors),
        *map(ctypes.c_int64, numbers),
        ctypes.c_float(attend.scale),
        ctypes.c_float(attend.soft_cap),
        workers,
    )
    return out


def inputs(
    lens: list[tuple[int, int]],  # queries and context length of each row
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    page_size: int = 16,
    **options: float | Tensor,
) -> dict:
    generator = torch.Generator().manual_seed(3)
    window = int(options.get("window", 0))
    needed = [-(-context // page_size) for _, context in lens]
    ids = torch.randperm(sum(needed), generator=generator).to(torch.int32) + 1
    pages = torch.randn(2, len(ids) + 1, page_size, kv_heads, dim, generator=generator).bfloat16()
    pages[:, 0] = torch.nan
    table = torch.zeros(len(lens), max(needed), dtype=torch.int32)
    for row, (own, (queries, context)) in enumerate(zip(ids.split(needed), lens, strict=True)):
        table[row, : len(own)] = own
        pages[:, own[-1].item(), (context - 1) % page_size + 1 :] = torch.nan
        gone = max(0, context - queries - window + 1) // page_size if window else 0
        table[row, :gone] = 0  # pages that no query sees have been given back
    queries = [query for query, _ in lens]
    contexts = [context for _, context in lens]
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    return {
        "query": torch.randn(sum(queries), heads, dim, generator=generator).bfloat16() * 2,
        "rows": Rows(starts, torch.tensor(contexts, dtype=torch.int32), table, tuple(queries), tuple(contexts)),
        "attend": Attend(pages[0].contiguous(), pages[1].contiguous(), dim**-0.5, **options),
    }


def expected(arguments: dict) -> Tensor:
    wide = {name: copy_to(value, "cpu", wide=True) for name, value in arguments.items()}
    for pages in wide["attend"][:2]:
        pages.nan_to_num_()
    return paged_attention(**wide)


@pytest.mark.parametrize(
    "options",
    [
        {"lens": [(200, 200)]},
        {"lens": [(33, 33)]},
        {"lens": [(70, 333)]},
        {"lens": [(150, 150)], "heads": 3, "kv_heads": 3},
        {"lens": [(150, 150)], "heads": 7, "kv_heads": 1},
        {"lens": [(40, 300)], "heads": 160, "kv_heads": 1, "dim": 32},
        {"lens": [(100, 300)], "dim": 80},
        {"lens": [(100, 300)], "dim": 37, "page_size": 7},
        {"lens": [(90, 300)], "dim": 128, "page_size": 1},
        {"lens": [(64, 64)], "dim": 256, "page_size": 64},
        {"lens": [(200, 400)], "window": 50},
        {"lens": [(200, 400)], "window": 1},
        {"lens": [(200, 400)], "window": 1000},
        {"lens": [(200, 300)], "soft_cap": 2.0},
        {"lens": [(200, 300)], "soft_cap": 5.0, "window": 130},
        {"lens": [(100, 300)], "sinks": torch.tensor([1.0, -2.0, 30.0, 0.0])},
        {"lens": [(100, 300)], "sinks": torch.tensor([1.0, -2.0, 3.0, 0.0]), "window": 40},
        {"lens": [(32, 40), (100, 100), (64, 500)]},
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items())[:60],
)
def test_long_rows(tiles: ctypes.CDLL, options: dict) -> None:
    arguments = inputs(**options)
    found, meaning = run(tiles, 3, arguments, stride=5), expected(arguments)
    torch.testing.assert_close(found.double(), meaning, rtol=0.0, atol=1e-2 * meaning.abs().max().item())


def test_short_rows_use_vector_code(tiles: ctypes.CDLL) -> None:
    lens = [(1, 9), (1, 40), (60, 90), (3, 12), (40, 40), (1, 30)]
    arguments = inputs(lens)
    found, meaning = run(tiles, 2, arguments), expected(arguments)
    at = 0
    for queries, _ in lens:
        own = slice(at, at := at + queries)
        if queries < 32:
            assert (found[own] == MARK).all()
        else:
            torch.testing.assert_close(found[own].double(), meaning[own], rtol=0.0, atol=2e-2)


def test_values_narrower_than_keys_use_vector_code(tiles: ctypes.CDLL) -> None:
    """Latent attention has such values."""
    assert (run(tiles, 2, inputs([(60, 90), (1, 9)], kv_heads=1), start=16) == MARK).all()


def test_results_are_the_same_for_any_number_of_threads(tiles: ctypes.CDLL) -> None:
    arguments = inputs([(150, 200), (40, 300)])
    answers = [run(tiles, workers, arguments) for workers in (1, 2, 9)]
    assert all(torch.equal(answers[0], other) for other in answers[1:])


def test_a_nan_query_affects_only_itself(tiles: ctypes.CDLL) -> None:
    arguments = inputs([(100, 100)])
    arguments["query"][40, 1, 5] = torch.nan
    found = run(tiles, 2, arguments)
    assert found[40, 1].isnan().all()
    found[40, 1] = 0.0
    assert found.isfinite().all()
