"""Cases on both sides of every limit of a kernel's wrapper. Beyond the limit the reference computes the result,
which must be as accurate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from localllm.kernels.ops.cases import (
    activation,
    attention,
    kv,
    layer,
    linear,
    linear_fp8,
    linear_int4,
    linear_int8,
    linear_mxfp4,
    norm,
    rope,
)
from localllm.kernels.ops.cases.case import Case
from localllm.kernels.ops.sampling import Draws

_WEIGHT = ("weight",)
_F32 = {torch.float32: 2e-5}
_LAYER = {torch.float32: 5e-5, torch.bfloat16: 4e-2}
_SHORT = [(1, 9), (5, 12), (3, 7)]
_LONG = [(1, 40), (40, 70)]

Make = Callable[[torch.Generator, torch.dtype], Mapping[str, Any]]


def _attention() -> Iterator[tuple[str, Make]]:
    for dim in (1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513):
        yield f"head-{dim}", attention._inputs(_SHORT, 2, 1, dim)
    for group in (1, 7, 8, 9, 16, 17, 32, 33, 128, 129):
        yield f"group-{group}", attention._inputs(_SHORT, group, 1, 64, 16)
    for dim, group in ((128, 8), (128, 9), (256, 16), (256, 64), (512, 4), (512, 32), (512, 129)):
        yield f"head-{dim}-group-{group}", attention._inputs(_SHORT, group, 1, dim, 16)
    for size in (1, 4, 7, 8, 12, 16, 24, 96, 128, 192, 256, 384):
        yield f"page-{size}", attention._inputs(_LONG, 4, 2, 64, size)
    for window in (1, 2, 39, 40, 41, 69, 70, 71, 300):
        yield f"window-{window}", attention._inputs(_LONG, 4, 2, 64, 16, window=window)
    for queries in (1, 2, 3, 4, 5, 127, 128, 129):
        yield f"queries-{queries}", attention._inputs([(queries, queries + 3), (1, 2)], 4, 2, 128, 16)
    yield "rows-65537", attention._inputs([(1, 1)] * 65537, 1, 1, 64, 1)


def _append() -> Iterator[tuple[str, Make]]:
    for dim, half in ((2, 1), (8, 4), (16, 5), (248, 124), (256, 128), (256, 126), (264, 132), (512, 256), (520, 4)):
        yield f"head-{dim}-half-{half}", kv._append(3, 3, 1, dim, half)
    yield "head-12289", kv._append(1, 1, 1, 12289, 2)


def _norms(residual: bool) -> Iterator[tuple[str, Make]]:
    for width in (1, 7, 8, 8191, 8192, 8193, 16384, 16392):
        yield f"width-{width}", norm._inputs((2, width), 0.0, residual)


def _gates() -> Iterator[tuple[str, Make]]:
    for width in (2, 14, 16, 2046, 2048, 2050):
        yield f"width-{width}", activation._inputs((3, width))


def _turns() -> Iterator[tuple[str, Make]]:
    for dim, rotary in ((2, 2), (8, 8), (64, 8), (64, 10), (256, 256), (258, 256), (512, 512)):
        yield f"head-{dim}-of-{rotary}", rope._inputs(3, 2, 1, dim, rotary)


def _embeddings() -> Iterator[tuple[str, Make]]:
    def lookup(width: int) -> Make:
        def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
            tokens = torch.randint(0, 9, (5,), generator=generator, dtype=torch.int32)
            return {"tokens": tokens, "weight": torch.randn(9, width, generator=generator).to(dtype), "scale": 3.7}

        return make

    for width in (1, 7, 8, 1024, 1032):
        yield f"width-{width}", lookup(width)


def _products(inputs: Callable[..., Make], groups: tuple[int, ...] = ()) -> Iterator[tuple[str, Make]]:
    """Products with many values of rows and groups, and with inputs that do or do not fill whole vectors."""
    own = groups[:1]
    for rows in (8, 9, 15, 16, 17):
        yield f"rows-{rows}", inputs(rows, 256, 40, *own)
    for in_features in (7, 8, 9, 120, 128, 136):
        yield f"inputs-{in_features}", inputs(3, in_features, 40, *own)
    for rows, in_features in ((1, 16384), (1, 16416), (8, 2048), (8, 2080), (16, 4096)):
        yield f"rows-{rows}-inputs-{in_features}", inputs(rows, in_features, 24, *own)
    for group in groups:
        yield f"group-{group}", inputs(9, 384, 40, group)
        yield f"one-row-of-groups-{group}", inputs(1, 384, 40, group)


def _fp8(rows: int, in_features: int, out_features: int, group: int) -> Make:
    return linear_fp8._inputs(rows, in_features, out_features, in_features if group == 0 else group)


def _mxfp4() -> Iterator[tuple[str, Make]]:
    """Like _products, but with multiples of 32 inputs, as MXFP4 requires."""
    for rows in (1, 2, 8, 9, 15, 16, 17):
        yield f"rows-{rows}", linear_mxfp4._inputs(rows, 256, 40)
    for in_features in (32, 96, 128, 160):
        yield f"inputs-{in_features}", linear_mxfp4._inputs(3, in_features, 40)
    for rows, in_features in ((1, 16384), (1, 16416), (8, 2048), (8, 2080), (16, 4096)):
        yield f"rows-{rows}-inputs-{in_features}", linear_mxfp4._inputs(rows, in_features, 24)


def _layers() -> Iterator[tuple[str, Make]]:
    lens = [(1, 9), (1, 3)]
    for rows in (1, 2, 8, 9):
        yield f"rows-{rows}", layer.inputs([(1, 5 + row) for row in range(rows)], 4, 2, 64, 128, 64, page_size=16)
    for hidden in (120, 124):
        yield f"hidden-{hidden}", layer.inputs(lens, 4, 2, 64, hidden, 64, page_size=16)
    yield "inner-28", layer.inputs(lens, 4, 2, 64, 128, 28, page_size=16)
    yield "head-512", layer.inputs(lens, 2, 1, 512, 128, 64, page_size=16)


def _stacks() -> Iterator[tuple[str, Make]]:
    def stack(
        heads: int = 8, kv_heads: int = 2, dim: int = 64, hidden: int = 256, inner: int = 192, **more: Any
    ) -> Make:
        return layer.inputs([(1, 33)], heads, kv_heads, dim, hidden, inner, layers=2, **{"page_size": 16, **more})

    yield "within", stack()
    yield "window", stack(window=9)
    yield "soft-cap", stack(soft_cap=3.0)
    yield "page-12", stack(page_size=12)
    yield "group-9", stack(heads=9, kv_heads=1)
    yield "head-96", stack(dim=96)
    yield "hidden-192", stack(hidden=192)
    yield "inner-160", stack(inner=160)
    yield "after-norms", stack(after_norms=True)


def _logits(vocab: int, op: str) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        x = torch.randn(3, vocab, generator=generator) * 3.0
        if op == "mask":
            words = torch.randint(-(2**31), 2**31, (2, -(-vocab // 32)), generator=generator).int()
            return {"logits": x, "rows": torch.tensor([0, 2]), "words": words}
        if op == "logprobs":
            return {"logits": x, "tokens": torch.tensor([0, vocab - 1, vocab // 2]), "k": min(vocab, 5)}
        if op == "greedy":
            return {"logits": x}
        seeds = torch.randint(-(2**31), 2**31, (3, 3), generator=generator).int()
        heat, top_p = torch.tensor([0.0, 0.8, 1.3]), torch.tensor([1.0, 0.7, 0.9])
        top_k, min_p = torch.tensor([0, min(vocab, 9), 0], dtype=torch.int32), torch.tensor([0.0, 0.01, 0.0])
        return {"logits": x, "draws": Draws(heat, *seeds, top_k, top_p, min_p, vocab)}

    return make


def _vocabularies(op: str) -> Iterator[tuple[str, Make]]:
    for vocab in (1, 2, 31, 32, 33, 127, 129, 2047, 2048, 2049, 4097, 151_936):
        yield f"vocabulary-{vocab}", _logits(vocab, op)


def _limits() -> Iterator[Case]:
    tables: list[tuple[str, Iterator[tuple[str, Make]], Mapping[str, Any]]] = [
        ("attention.paged", _attention(), {}),
        ("kv.append", _append(), {"mutates": kv.TARGET}),
        ("norm.rms", _norms(False), {}),
        ("norm.add_rms", _norms(True), {}),
        ("activation.silu_and_mul", _gates(), {}),
        ("rope.neox", _turns(), {}),
        ("rope.interleaved", _turns(), {}),
        ("linear.embedding", _embeddings(), {}),
        ("linear.dense", _products(linear._product), {"packs": _WEIGHT}),
        ("linear.int8", _products(linear_int8._inputs), {"packs": _WEIGHT}),
        ("linear.int4", _products(linear_int4._inputs, (32, 64, 96, 128, 256)), {"packs": _WEIGHT}),
        ("linear.int4_wide", _products(linear_int4._inputs, (32, 64, 96, 128, 256)), {"packs": _WEIGHT}),
        ("linear.fp8", _products(_fp8, (0, 32, 64, 96, 128)), {"packs": _WEIGHT}),
        ("linear.mxfp4", _mxfp4(), {"packs": _WEIGHT}),
        ("layer.decoder", _layers(), {"tolerances": _LAYER, "mutates": layer.CACHE, "packs": ("layer",)}),
        ("layer.decoders", _stacks(), {"tolerances": _LAYER, "mutates": layer.CACHE, "packs": ("stack",)}),
        ("sampling.mask", _vocabularies("mask"), {"tolerances": _F32, "mutates": ("logits",)}),
        ("sampling.greedy", _vocabularies("greedy"), {"tolerances": _F32}),
        ("sampling.draw", _vocabularies("draw"), {"tolerances": _F32}),
        ("sampling.logprobs", _vocabularies("logprobs"), {"tolerances": _F32}),
    ]
    for op, cases, more in tables:
        for label, make in cases:
            yield Case(op, label, make, **more)


LIMITS = tuple(_limits())
_SLOW = ("65537", "151936", "16384", "16416", "16392", "-129")  # to interpret


def sample(each: int) -> tuple[Case, ...]:
    """The first case of each op, the last case, and some cases between."""
    chosen = []
    for op in dict.fromkeys(case.op for case in LIMITS):
        own = [case for case in LIMITS if case.op == op and not case.label.endswith(_SLOW)]
        chosen += own if len(own) <= each else [own[at * (len(own) - 1) // (each - 1)] for at in range(each)]
    return tuple(chosen)


_SAMPLED = {str(case) for case in sample(3)}
PARAMETERS = [pytest.param(case, marks=() if str(case) in _SAMPLED else pytest.mark.slow) for case in LIMITS]
