"""The reference of fused attention, against a loop over tokens and heads that knows no layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from . import kernels
from .ops.attention import MASK, FusedInferAttentionScoreV2

pytestmark = pytest.mark.emulated

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 128
QUERIES, LENGTHS = [3, 1, 5], [200, 1, 130]
OP = FusedInferAttentionScoreV2()
KERNEL = kernels.Kernel(OP.names[0], OP)


def keys(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, KV_HEADS, DIM, generator=generator) for length in LENGTHS]


def queries(counts: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(count, HEADS, DIM, generator=generator) for count in counts]


def oracle(rows: list[Tensor], sees: Callable[[int, int, int, int], bool], sink: Tensor | None = None) -> list[Tensor]:
    """`sees(query, position, queries, length)`: whether a query of a row sees a position."""
    outputs = []
    for query, key, value in zip(rows, keys(1), keys(2), strict=True):
        out = torch.zeros(len(query), HEADS, DIM)
        for token in range(len(query)):
            for head in range(HEADS):
                seen = [at for at in range(len(key)) if sees(token, at, len(query), len(key))]
                kv_head = head // (HEADS // KV_HEADS)
                scores = [math.exp(float(query[token, head] @ key[at, kv_head]) / 4) for at in seen]
                rest = math.exp(float(sink[head])) if sink is not None else 0.0
                for at, score in zip(seen, scores, strict=True):
                    out[token, head] += score / (sum(scores) + rest) * value[at, kv_head]
        outputs.append(out)
    return outputs


def paged(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Pages [blocks, block, H], and a table with the rows' blocks in reverse order."""
    table = torch.tensor([[5, 4], [3, 0], [2, 1]], dtype=torch.int32)
    pages = torch.full((6, BLOCK, KV_HEADS, DIM), 1e6)  # of positions that nothing reads
    for row, blocks in zip(rows, table, strict=True):
        for part, block in zip(row.split(BLOCK), blocks, strict=False):
            pages[block, : len(part)] = part
    return pages.flatten(2), table


def call(rows: list[Tensor], layout: str, **more: Any) -> Tensor:
    """The outputs [tokens, heads, dim] of all rows, over pages."""
    key, table = paged(keys(1))
    options: dict[str, Any] = {"sparse_mode": 3, "atten_mask": torch.ones(MASK, MASK, dtype=torch.bool).triu(1)}
    options |= {"block_table": table, "block_size": BLOCK, "softmax_scale": 0.25, "actual_seq_kvlen": LENGTHS}
    options |= {"num_query_heads": HEADS, "num_key_value_heads": KV_HEADS, "input_layout": layout}
    layout_in, _, layout_out = layout.partition("_")
    if layout == "TND":
        query = torch.cat(rows)
        options["actual_seq_qlen"] = torch.tensor([len(row) for row in rows]).cumsum(0).tolist()
    else:
        query = torch.stack(rows)
        query = query.flatten(2) if layout_in == "BSH" else query.transpose(1, 2) if layout_in == "BNSD" else query
    arguments = {"query": query, "key": key, "value": paged(keys(2))[0], **options, **more}
    out = OP.compute(KERNEL.bind((), arguments))[0]
    if (layout_out or layout_in) == "BNSD":
        out = out.transpose(1, 2)
    if layout == "BSH":
        out = out.unflatten(2, (HEADS, -1))
    return out if layout == "TND" else out.flatten(0, 1)


def causal(token: int, at: int, queries: int, length: int) -> bool:
    return at <= token + length - queries


def window(token: int, at: int, queries: int, length: int) -> bool:
    return token + length - queries - 4 <= at <= token + length - queries


def near(actual: Tensor, expected: list[Tensor]) -> None:
    torch.testing.assert_close(actual, torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
def test_rows_of_equal_length(layout: str) -> None:
    rows = queries([4, 4, 4])
    near(call(rows, layout), oracle(rows, causal))


def test_rows_of_any_length() -> None:
    near(call(queries(QUERIES), "TND"), oracle(queries(QUERIES), causal))


def test_a_window_counts_from_the_last_key() -> None:
    options = {"sparse_mode": 4, "pre_tokens": 4, "next_tokens": 0}
    near(call(queries(QUERIES), "TND", **options), oracle(queries(QUERIES), window))


def test_mode_2_counts_from_the_first_key() -> None:
    rows = queries([2, 2, 2])
    near(call(rows, "BSND", sparse_mode=2), oracle(rows, lambda token, at, *_: at <= token))


def test_a_sink_joins_the_denominator() -> None:
    sink = torch.randn(HEADS)
    near(call(queries(QUERIES), "TND", learnable_sink=sink), oracle(queries(QUERIES), causal, sink))


def test_one_query_ignores_the_sparse_mode_but_not_a_mask_of_its_row() -> None:
    rows = queries([1, 1, 1])
    everything = oracle(rows, lambda *_: True)
    near(call(rows, "BSND", sparse_mode=4, pre_tokens=4, next_tokens=0), everything)
    near(call(rows, "BSND", sparse_mode=0, atten_mask=None), everything)
    starts = torch.tensor([n - 5 for n in LENGTHS]).view(3, 1, 1, 1)
    mask = torch.arange(2 * BLOCK) < starts
    near(call(rows, "BSND", sparse_mode=0, atten_mask=mask), oracle(rows, window))


def test_keys_without_pages() -> None:
    more = {"key": torch.cat(keys(1)), "value": torch.cat(keys(2)), "block_table": None, "block_size": 0}
    lens = torch.tensor(LENGTHS).cumsum(0).tolist()
    near(call(queries(QUERIES), "TND", actual_seq_kvlen=lens, **more), oracle(queries(QUERIES), causal))


def test_int8_keys_have_a_scale_for_each_channel() -> None:
    whole = [paged([row.mul(16).round() for row in keys(seed)])[0].clamp(-127, 127) for seed in (1, 2)]
    scale = torch.full((KV_HEADS * DIM,), 1 / 16)
    floats = call(queries(QUERIES), "TND", key=whole[0] / 16, value=whole[1] / 16)
    scales = {"dequant_scale_key": scale, "dequant_scale_value": scale}
    integers = call(queries(QUERIES), "TND", key=whole[0].to(torch.int8), value=whole[1].to(torch.int8), **scales)
    torch.testing.assert_close(integers, floats)


def test_ropes_extend_the_latents() -> None:
    """Queries and keys of latents and ropes are those of one longer dimension."""
    rows = queries([1, 1, 1])
    table = {"sparse_mode": 0, "atten_mask": None, "num_key_value_heads": 1}
    latent, rope = (torch.randn(6, BLOCK, dim) for dim in (16, 8))
    rotary = torch.randn(3, 1, HEADS, 8)
    parts = call(rows, "BSND", key=latent, value=latent, key_rope=rope, query_rope=rotary, **table)
    whole = [torch.cat((row[None], turn[None]), -1)[0] for row, turn in zip(rows, rotary, strict=True)]
    joined = call(whole, "BSND", key=torch.cat((latent, rope), -1), value=latent, **table)
    torch.testing.assert_close(parts, joined)
