"""Ops without a large weight: element by element, LoRA products and sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Any

import torch
from shapes import Shape
from torch import Tensor

from localllm.kernels.ops.cases.lora import random_adapters, random_weights
from localllm.kernels.ops.kv import Append
from localllm.kernels.ops.sampling import Draws

from .work import Arguments, Work, randn

PAGE = 16
ADAPTERS = 4
RANK = 16


def lora(shape: Shape, dtype: torch.dtype) -> Iterator[Work]:
    """Products of rows with up to 4 adapters. The bound is the time to read the factors of all adapters once."""
    for rows, out_features in product((1, 8, 64), (shape.hidden, shape.inner)):
        label = f"{rows} rows, {min(rows, ADAPTERS)} adapters"
        sizes = min(rows, ADAPTERS) * RANK * dtype.itemsize
        adapted = partial(_adapted, dtype, rows, out_features, shape.hidden)
        reads = float(sizes * (out_features + shape.hidden))
        yield Work("lora.add", f"{label}, {out_features} × {shape.hidden}", partial(_added, adapted), reads)
        if out_features == shape.hidden:
            yield Work("lora.embedding", label, partial(_embedded, adapted), float(sizes * shape.hidden))


def _adapted(dtype: torch.dtype, rows: int, out_features: int, in_features: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    ranks = (0, *[RANK] * min(rows, ADAPTERS))
    return {
        "out": randn(dtype, rows, out_features),
        "weights": random_weights(ranks, in_features, (out_features,), generator, dtype),
        "adapters": random_adapters([(1, 1 + row % ADAPTERS) for row in range(rows)], generator),
    }


def _added(adapted: partial[dict[str, Any]]) -> Arguments:
    dtype, rows, _, in_features = adapted.args
    return {"x": randn(dtype, rows, in_features), **adapted()}


def _embedded(adapted: partial[dict[str, Any]]) -> Arguments:
    _, rows, _, vocab = adapted.args
    return {"tokens": torch.randint(vocab, (rows,), dtype=torch.int32), **adapted()}


def elements(shape: Shape, dtype: torch.dtype) -> Iterator[Work]:
    """Ops for 1 token and for a prefill of 512. Their bound is the time to read the inputs; outputs may stay in the
    caches."""
    ops = Elements(shape, dtype)
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    # (op, numbers that it reads for each token, function that makes its arguments)
    cases: list[tuple[str, int, Callable[[int], Arguments]]] = [
        ("norm.rms", shape.hidden, ops.norm),
        ("norm.add_rms", 2 * shape.hidden, ops.add_norm),
        ("linear.embedding", shape.hidden, ops.embedding),
        ("activation.silu_and_mul", 2 * shape.inner, ops.gate),
        ("activation.gelu_and_mul", 2 * shape.inner, ops.gate),
        ("activation.gelu_tanh_and_mul", 2 * shape.inner, ops.gate),
        ("rope.neox", queries + keys + shape.head_dim, ops.rope),
        ("rope.interleaved", queries + keys + shape.head_dim, ops.rope),
        ("kv.store", 2 * keys, ops.store),
        ("kv.copy_pages", 2 * keys, ops.copies),
        ("kv.append", queries + 2 * keys + shape.head_dim, ops.append),
    ]
    for tokens, (op, values, make) in product((1, 512), cases):
        label = f"{tokens} token{'s' * (tokens > 1)}"
        yield Work(op, label, partial(make, tokens), dtype.itemsize * values * tokens)


@dataclass(frozen=True, slots=True)
class Elements:
    """Makes the arguments of element-wise ops for a number of tokens."""

    shape: Shape
    dtype: torch.dtype

    def norm(self, tokens: int) -> Arguments:
        return {"x": self._randn(tokens, self.shape.hidden), "weight": self._randn(self.shape.hidden), "eps": 1e-6}

    def add_norm(self, tokens: int) -> Arguments:
        return {**self.norm(tokens), "residual": self._randn(tokens, self.shape.hidden)}

    def embedding(self, tokens: int) -> Arguments:
        weight = _table(self.shape.vocab, self.shape.hidden, self.dtype)
        return {"tokens": torch.randint(len(weight), (tokens,), dtype=torch.int32), "weight": weight}

    def gate(self, tokens: int) -> Arguments:
        return {"gate_up": self._randn(tokens, 2 * self.shape.inner)}

    def rotations(self, tokens: int) -> Arguments:
        angles = torch.rand(tokens, self.shape.head_dim // 2)
        return {"cos": angles.cos(), "sin": angles.sin()}

    def rope(self, tokens: int) -> Arguments:
        heads = {"query": self.shape.heads, "key": self.shape.kv_heads}
        return {name: self._heads(tokens, count) for name, count in heads.items()} | self.rotations(tokens)

    def pages(self, tokens: int) -> Arguments:
        keys, values = self._randn(2, tokens // PAGE + 2, PAGE, self.shape.kv_heads, self.shape.head_dim)
        return {"key_pages": keys, "value_pages": values, "slots": torch.arange(PAGE, PAGE + tokens)}

    def store(self, tokens: int) -> Arguments:
        heads = self.shape.kv_heads
        return {"key": self._heads(tokens, heads), "value": self._heads(tokens, heads), **self.pages(tokens)}

    def copies(self, tokens: int) -> Arguments:
        """Copies the pages of the tokens to other pages."""
        pages = max(1, tokens // PAGE)
        ids = torch.randperm(2 * pages)
        cache = self._randn(2, 2 * pages, PAGE, self.shape.kv_heads, self.shape.head_dim)
        return {"pages": cache, "sources": ids[:pages], "targets": ids[pages:]}

    def append(self, tokens: int) -> Arguments:
        norms = self._randn(self.shape.head_dim), self._randn(self.shape.head_dim)
        qkv = self._heads(tokens, self.shape.heads + 2 * self.shape.kv_heads)
        pages = self.pages(tokens)
        target = Append(pages["key_pages"], pages["value_pages"], "neox", *norms)
        return {"qkv": qkv, "slots": pages["slots"], "target": target, **self.rotations(tokens)}

    def _heads(self, tokens: int, heads: int) -> Tensor:
        return self._randn(tokens, heads, self.shape.head_dim)

    def _randn(self, *shape: int) -> Tensor:
        return randn(self.dtype, *shape)


@lru_cache(maxsize=1)
def _table(vocab: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """The embedding table, which all arguments share: each reads other rows."""
    return torch.randn(vocab, hidden, dtype=dtype)


def sampling(vocab: int) -> Iterator[Work]:
    """Each op with 1 row and with 16 rows. The bound is the time to read the logits once."""
    cases: list[tuple[str, str, Callable[[int, int], Arguments]]] = [
        ("sampling.greedy", "", _greedy),
        ("sampling.draw", ", temperature", partial(_draw, vocab, 1.0)),
        ("sampling.draw", ", top_k 40", partial(_draw, 40, 1.0)),
        ("sampling.draw", ", top_p 0.9", partial(_draw, vocab, 0.9)),
        ("sampling.mask", "", _allowed),
        ("sampling.logprobs", "", _logprobs),
    ]
    for rows, (op, label, make) in product((1, 16), cases):
        yield Work(op, f"{rows} rows of {vocab}{label}", partial(make, rows=rows, vocab=vocab), 4.0 * rows * vocab)


def _greedy(rows: int, vocab: int) -> Arguments:
    return {"logits": torch.randn(rows, vocab) * 3.0}


def _draw(top_k: int, top_p: float, rows: int, vocab: int) -> Arguments:
    draws = Draws(
        temperature=torch.full((rows,), 0.8),
        seed_low=torch.arange(rows, dtype=torch.int32),
        seed_high=torch.arange(rows, dtype=torch.int32),
        position=torch.arange(rows, dtype=torch.int32),
        top_k=torch.full((rows,), top_k, dtype=torch.int32) if top_k < vocab else None,
        top_p=torch.full((rows,), top_p) if top_p < 1 else None,
        min_p=None,
        max_k=top_k,
    )
    return {**_greedy(rows, vocab), "draws": draws}


def _allowed(rows: int, vocab: int) -> Arguments:
    bits = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), dtype=torch.int32)
    return {**_greedy(rows, vocab), "rows": torch.arange(rows), "words": bits}


def _logprobs(rows: int, vocab: int) -> Arguments:
    return {**_greedy(rows, vocab), "tokens": torch.randint(vocab, (rows,)), "k": 0}
