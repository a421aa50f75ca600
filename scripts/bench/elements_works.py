"""Benchmarks of element-wise ops. Their bound is the time to read the inputs; outputs may stay in the caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from work import Work

from localllm.kernels.ops import Ops

PAGE = 16
Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes of a model, which determine the shapes of these ops."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int
    dtype: torch.dtype

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.dtype)

    def norm(self, tokens: int) -> Arguments:
        return {"x": self.random(tokens, self.hidden), "weight": self.random(self.hidden), "eps": 1e-6}

    def add_norm(self, tokens: int) -> Arguments:
        return {**self.norm(tokens), "residual": self.random(tokens, self.hidden)}

    def layer_norm(self, tokens: int) -> Arguments:
        return {**self.norm(tokens), "bias": self.random(self.hidden)}

    def embedding(self, tokens: int) -> Arguments:
        return {"tokens": torch.randint(self.vocab, (tokens,), dtype=torch.int32), "weight": _table(self)}

    def gate(self, tokens: int) -> Arguments:
        return {"gate_up": self.random(tokens, 2 * self.inner)}

    def rotations(self, tokens: int) -> Arguments:
        angles = torch.rand(tokens, self.dim // 2)
        return {"cos": angles.cos(), "sin": angles.sin()}

    def rope(self, tokens: int) -> Arguments:
        query = self.random(tokens, self.heads, self.dim)
        key = self.random(tokens, self.kv_heads, self.dim)
        return {"query": query, "key": key, **self.rotations(tokens)}

    def pages(self, tokens: int) -> Arguments:
        keys, values = self.random(2, tokens // PAGE + 2, PAGE, self.kv_heads, self.dim)
        return {"key_pages": keys, "value_pages": values, "slots": torch.arange(PAGE, PAGE + tokens)}

    def store(self, tokens: int) -> Arguments:
        key, value = self.random(2, tokens, self.kv_heads, self.dim)
        return {"key": key, "value": value, **self.pages(tokens)}

    def copies(self, pages: int) -> Arguments:
        """The arguments to copy `pages` pages to as many other pages."""
        ids = torch.randperm(2 * pages)
        cache = self.random(1, 2 * pages, PAGE, self.kv_heads, self.dim)
        return {"pages": cache, "sources": ids[:pages], "targets": ids[pages:]}

    def append(self, tokens: int) -> Arguments:
        return {
            "qkv": self.random(tokens, self.heads + 2 * self.kv_heads, self.dim),
            "query_norm": self.random(self.dim),
            "key_norm": self.random(self.dim),
            "eps": 1e-6,
            "offset": 0.0,
            "rotation": "neox",
            **self.rotations(tokens),
            **self.pages(tokens),
        }


@lru_cache(maxsize=1)
def _table(model: Model) -> Tensor:
    """The embedding table, shared by all sets of arguments: each set reads different rows."""
    return model.random(model.vocab, model.hidden)


def works(model: Model) -> Iterator[Work]:
    """A `Work` for each op and size: 1 token and a prefill of 512 tokens; for copies, 1 page and 32 pages."""
    queries = model.heads * model.dim
    keys = model.kv_heads * model.dim
    angles = model.dim  # number of values of cos and sin for a token
    # (op, number of values that it reads per token or page, function that makes its arguments)
    cases: list[tuple[str, int, Callable[[int], Arguments]]] = [
        ("norm.rms", model.hidden, model.norm),
        ("norm.layer", model.hidden, model.layer_norm),
        ("linear.embedding", model.hidden, model.embedding),
        ("norm.add_rms", 2 * model.hidden, model.add_norm),
        ("activation.silu_and_mul", 2 * model.inner, model.gate),
        ("activation.gelu_and_mul", 2 * model.inner, model.gate),
        ("activation.gelu_tanh_and_mul", 2 * model.inner, model.gate),
        ("rope.neox", queries + keys + angles, model.rope),
        ("rope.interleaved", queries + keys + angles, model.rope),
        ("kv.store", 2 * keys, model.store),
        ("kv.copy_pages", PAGE * keys, model.copies),
        ("kv.append", queries + 2 * keys + angles, model.append),
    ]
    reference = dict(Ops())
    for tokens in (1, 512):
        for op, numbers, make in cases:
            count = tokens
            unit = "token"
            if op == "kv.copy_pages":
                count = max(1, tokens // PAGE)
                unit = "page"
            yield Work(
                op=op,
                label=f"{count} {unit}{'s' if count > 1 else ''}",
                make=partial(make, count),
                bytes=model.dtype.itemsize * numbers * count,
                reference=reference[op],
                dtype=model.dtype,
            )
