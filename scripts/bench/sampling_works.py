"""Benchmarks of sampling. The bound is the time to read the logits once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from work import Work

from localllm.kernels.ops import Ops
from localllm.kernels.ops.sampling import Draws

Arguments = Mapping[str, Any]


def works(vocab: int) -> Iterator[Work]:
    """A `Work` for each sampling op with 1 row and with 16 rows."""
    cases: list[tuple[str, str, Callable[[int, int], Arguments]]] = [
        ("sampling.greedy", "", _greedy),
        ("sampling.draw", ", temperature", lambda rows, vocab: _draw(rows, vocab, 0, 1.0)),
        ("sampling.draw", ", top_k 40", lambda rows, vocab: _draw(rows, vocab, 40, 1.0)),
        ("sampling.draw", ", top_p 0.9", lambda rows, vocab: _draw(rows, vocab, 0, 0.9)),
        ("sampling.mask", "", _mask),
        ("sampling.logprobs", "", _logprobs),
    ]
    reference = dict(Ops())
    for rows in (1, 16):
        for op, label, make in cases:
            yield Work(
                op=op,
                label=f"{rows} rows of {vocab}{label}",
                make=partial(make, rows, vocab),
                bytes=4.0 * rows * vocab,
                reference=reference[op],
            )


def _greedy(rows: int, vocab: int) -> Arguments:
    return {"logits": torch.randn(rows, vocab) * 3.0}


def _draw(rows: int, vocab: int, top_k: int, top_p: float) -> Arguments:
    seeds = torch.arange(2 * rows, dtype=torch.int32).view(2, rows)
    draws = Draws(
        temperature=torch.full((rows,), 0.8),
        seed_low=seeds[0],
        seed_high=seeds[1],
        position=torch.arange(rows, dtype=torch.int32),
        top_k=torch.full((rows,), top_k, dtype=torch.int32) if top_k else None,
        top_p=torch.full((rows,), top_p) if top_p < 1 else None,
        min_p=None,
        max_k=top_k or vocab,
    )
    return {**_greedy(rows, vocab), "draws": draws}


def _mask(rows: int, vocab: int) -> Arguments:
    words = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), dtype=torch.int32)
    return {**_greedy(rows, vocab), "rows": torch.arange(rows), "words": words}


def _logprobs(rows: int, vocab: int) -> Arguments:
    return {**_greedy(rows, vocab), "tokens": torch.randint(vocab, (rows,)), "k": 0}
