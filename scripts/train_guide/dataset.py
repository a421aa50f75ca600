"""Conversations as token rows grouped by width, so that a batch needs little padding."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from tokenizers import Tokenizer

from .chatml import ASSISTANT, DOCUMENT_END, END, render
from .corpus import conversations, with_system
from .facts import Facts
from .shape import CONTEXT

WIDTHS = np.array(
    [32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024, 1280, 1536, CONTEXT]
)


@dataclass
class Bucket:
    """Rows of one width. Row i holds `tokens[i]`; `learned[i]` marks the tokens an answer consists of."""

    tokens: torch.Tensor  # [rows, width] int16
    learned: torch.Tensor  # [rows, width] bool


def texts(seed: int, shard: int, count: int, facts: Facts) -> list[str]:
    return [render(with_system(c), c.tools or None) for c in conversations(seed, shard, count, facts)]


def build(tokenizer: Tokenizer, seed: int, shards: int, per_shard: int, facts: Facts, workers: int) -> list[Bucket]:
    """All conversations of a seed, the same whatever the number of workers."""
    arguments = (repeat(tokenizer.to_str()), repeat(seed), range(shards), repeat(per_shard), repeat(facts))
    parts: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    if workers > 1:
        with ProcessPoolExecutor(workers, initializer=_alone) as pool:
            results = list(pool.map(_shard, *arguments))
    else:
        results = [_shard(tokenizer.to_str(), seed, shard, per_shard, facts) for shard in range(shards)]
    for result in results:
        for width, part in result.items():
            parts.setdefault(width, []).append(part)
    return [
        Bucket(
            torch.from_numpy(np.concatenate([tokens for tokens, _ in parts[width]])),
            torch.from_numpy(np.concatenate([learned for _, learned in parts[width]])),
        )
        for width in sorted(parts)
    ]


def _alone() -> None:
    """A forked process has none of the tokenizer's threads, and would wait for them for ever."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _shard(
    tokenizer_json: str, seed: int, shard: int, count: int, facts: Facts
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    opening = tokenizer.encode(ASSISTANT).ids
    end, padding = tokenizer.token_to_id(END), tokenizer.token_to_id(DOCUMENT_END)
    rows: dict[int, list[list[int]]] = {}
    for encoding in tokenizer.encode_batch_fast(texts(seed, shard, count, facts)):
        ids = encoding.ids
        if len(ids) <= CONTEXT:
            rows.setdefault(int(WIDTHS[np.searchsorted(WIDTHS, len(ids))]), []).append(ids)
    found = {}
    for width, group in rows.items():
        tokens = np.full((len(group), width), padding, np.int16)
        for at, ids in enumerate(group):
            tokens[at, : len(ids)] = ids
        found[width] = tokens, answers(tokens, opening, end)
    return found


def answers(tokens: np.ndarray, opening: list[int], end: int) -> np.ndarray:
    """[rows, width] bool: the tokens after each opening of an answer, its end token included."""
    learned = np.zeros(tokens.shape, bool)
    inside = np.zeros(len(tokens), bool)
    for at in range(tokens.shape[1]):
        learned[:, at] = inside
        inside &= tokens[:, at] != end
        if at + 1 >= len(opening):
            inside |= (tokens[:, at + 1 - len(opening) : at + 1] == opening).all(axis=1)
    return learned


def batches(
    buckets: list[Bucket], tokens_per_batch: int, generator: torch.Generator
) -> Iterator[tuple[int, torch.Tensor]]:
    """One epoch in random order: pairs of bucket number and row numbers."""
    found = []
    for number, bucket in enumerate(buckets):
        rows = max(1, tokens_per_batch // bucket.tokens.shape[1])
        order = torch.randperm(len(bucket.tokens), generator=generator)
        found += [(number, order[at : at + rows]) for at in range(0, len(order), rows)]
    for at in torch.randperm(len(found), generator=generator).tolist():
        yield found[at]
