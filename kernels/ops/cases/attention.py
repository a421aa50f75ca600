"""Test cases of the ops of attention.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..attention import Attend, Rows
from .case import Case, Make


def _inputs(
    lens: list[tuple[int, int]],  # number of queries and context length of each row
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    page_size: int = 4,
    **options: Any,
) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        needed = [-(-context // page_size) for _, context in lens]
        ids = torch.randperm(sum(needed), generator=generator).to(torch.int32) + 1
        pages = torch.randn(2, len(ids) + 1, page_size, kv_heads, dim, generator=generator)
        table = torch.zeros(len(lens), max(needed), dtype=torch.int32)
        pages[:, 0] = float("nan")
        for row, (row_pages, (_, context)) in enumerate(zip(ids.split(needed), lens, strict=True)):
            table[row, : len(row_pages)] = row_pages
            pages[:, row_pages[-1].item(), (context - 1) % page_size + 1 :] = float("nan")
        queries = [query for query, _ in lens]
        starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
        contexts = [context for _, context in lens]
        return {
            "query": torch.randn(sum(queries), heads, dim, generator=generator).to(dtype),
            "rows": Rows(starts, torch.tensor(contexts, dtype=torch.int32), table, tuple(queries), tuple(contexts)),
            "attend": Attend(pages[0].to(dtype), pages[1].to(dtype), dim**-0.5, **options),
        }

    return make


def _with_sinks(lens: list[tuple[int, int]], heads: int = 4, **options: Any) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        inputs = _inputs(lens, heads, **options)(generator, dtype)
        sinks = torch.randn(heads, generator=generator) * 2.0
        return {**inputs, "attend": inputs["attend"]._replace(sinks=sinks)}

    return make


def _latents(
    lens: list[tuple[int, int]],
    heads: int = 4,
    rotary: int = 8,
    rank: int = 32,
    page_size: int = 4,
    *,
    apart: bool = False,
) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        arguments = _inputs(lens, heads, 1, rotary + rank, page_size)(generator, dtype)
        query, rows, attend = arguments["query"], arguments["rows"], arguments["attend"]
        keys = attend.key_pages
        pages = (keys[..., :rotary].contiguous(), keys[..., rotary:].contiguous()) if apart else (keys,)
        return {"query": query, "pages": pages, "rows": rows, "scale": attend.scale, "start": rotary}

    return make


_MIXED = [(1, 9), (1, 1), (1, 16), (5, 5), (3, 12), (3, 3), (1, 6)]

# Sizes of a real model with latent attention, in pages that the NPU reads.
_APART = {"heads": 4, "rotary": 64, "rank": 512, "page_size": 128}

_WIDE = {"heads": 8, "kv_heads": 2, "dim": 128, "page_size": 16}  # sizes of a real model
_NPU = {**_WIDE, "page_size": 128}  # in pages that NPUs read

CASES = [
    Case("attention.paged", "decode-wide", _inputs([(1, 9), (1, 300), (1, 64)], **_NPU)),
    Case("attention.paged", "one-row", _inputs([(1, 10)])),
    Case("attention.paged", "one-row-whole-pages", _inputs([(1, 8)])),
    Case("attention.paged", "decode", _inputs([(1, 9), (1, 1), (1, 16), (1, 7)])),
    Case("attention.paged", "prompt", _inputs([(11, 11)])),
    Case("attention.paged", "chunk", _inputs([(5, 14)])),
    Case("attention.paged", "mixed", _inputs(_MIXED)),
    Case("attention.paged", "one-kv-head", _inputs(_MIXED, heads=6, kv_heads=1)),
    Case("attention.paged", "no-sharing", _inputs(_MIXED, heads=3, kv_heads=3)),
    Case("attention.paged", "window", _inputs(_MIXED, window=4)),
    Case("attention.paged", "window-one-row", _inputs([(1, 13)], window=6)),
    Case("attention.paged", "soft-cap", _inputs(_MIXED, soft_cap=2.0)),
    Case("attention.paged", "soft-cap-window-one-row", _inputs([(1, 13)], window=6, soft_cap=2.0)),
    Case("attention.paged", "sinks", _with_sinks(_MIXED)),
    Case("attention.paged", "sinks-window-one-row", _with_sinks([(1, 13)], window=6)),
    Case("attention.paged", "sinks-soft-cap", _with_sinks(_MIXED, soft_cap=2.0, heads=6, kv_heads=2)),
    Case("attention.paged", "odd-head", _inputs(_MIXED, dim=37, page_size=3)),
    Case("attention.paged", "long-context", _inputs([(1, 700), (33, 290), (1, 64)], page_size=16, dim=80)),
    Case("attention.paged", "many-queries-window", _inputs([(70, 150)], window=40, page_size=16)),
    Case("attention.paged", "large-pages", _inputs(_MIXED, page_size=16, dim=64)),
    Case("attention.paged", "head-96", _inputs(_MIXED, heads=3, kv_heads=3, dim=96, page_size=16)),
    Case("attention.paged", "head-256", _inputs(_MIXED, dim=256, page_size=16, window=4)),
    Case("attention.paged", "page-size-one", _inputs(_MIXED, page_size=1)),
    Case("attention.paged", "mixed-wide", _inputs([(33, 290), (1, 64), (130, 130)], **_WIDE)),
    Case("attention.paged", "mixed-npu", _inputs([(7, 140), (1, 64), (3, 3)], **_NPU)),
    *(
        Case("attention.latent", label, make)
        for label, make in [
            ("one-row", _latents([(1, 10)])),
            ("decode", _latents([(1, 9), (1, 1), (1, 16), (1, 7)])),
            ("prompt", _latents([(11, 11)])),
            ("mixed", _latents(_MIXED)),
            ("one-head", _latents(_MIXED, heads=1)),
            ("odd-dims", _latents(_MIXED, heads=5, rotary=6, rank=37, page_size=3)),
            ("wide-decode", _latents([(1, 300), (1, 64)], heads=16, rotary=64, rank=512, page_size=16)),
            ("wide-mixed", _latents([(33, 90), (1, 64), (3, 40)], heads=16, rotary=64, rank=512, page_size=16)),
            ("many-heads", _latents([(1, 40), (9, 33)], heads=40, rotary=16, rank=64, page_size=16)),
            ("apart", _latents(_MIXED, apart=True)),
            ("apart-decode", _latents([(1, 300), (1, 64)], apart=True, **_APART)),
            ("apart-mixed", _latents([(16, 90), (1, 64), (3, 40)], apart=True, **_APART)),
            ("apart-long", _latents([(33, 290), (130, 130)], apart=True, **_APART)),
        ]
    ),
]
