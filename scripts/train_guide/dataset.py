"""Conversations as token rows grouped by width, so that a batch needs little padding."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from multiprocessing import get_context

import numpy as np
import torch
from tokenizers import Tokenizer

from .chatml import ASSISTANT, CONTEXT, DOCUMENT_END, END
from .corpus import conversations
from .facts import Facts
from .styles import Style, rewrite

WIDTHS = np.array(
    [32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024, 1280, 1536, CONTEXT]
)


@dataclass
class Bucket:
    """Rows of one width, padded. `answer_mask` marks the tokens of answers: only these count in the loss."""

    tokens: torch.Tensor  # [rows, width] int16
    answer_mask: torch.Tensor  # [rows, width] bool


def texts(seed: int, shard: int, count: int, facts: Facts, style: Style | None = None) -> list[str]:
    """The conversations of a shard. `style`: the style of their answers, except beside tools; None leaves all unchanged."""
    rendered = []
    for conversation in conversations(seed, shard, count, facts):
        if style and not conversation.tools:
            conversation = replace(conversation, messages=rewrite(conversation.messages, style))
        rendered.append(conversation.render())
    return rendered


def build(
    tokenizer: Tokenizer, seed: int, shards: int, per_shard: int, facts: Facts, workers: int, style: Style | None = None
) -> list[Bucket]:
    """All conversations of a seed. The number of workers does not change the result."""
    constants = (repeat(per_shard), repeat(facts), repeat(style))
    arguments = (repeat(tokenizer.to_str()), repeat(seed), range(shards), *constants)
    shards_by_width: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    if workers > 1:
        context = get_context("forkserver")  # a fork of this process would have the locks of its threads
        context.set_forkserver_preload([__name__])
        with ProcessPoolExecutor(workers, context, initializer=_single_threaded) as pool:
            results = list(pool.map(_shard, *arguments))
    else:
        results = list(map(_shard, *arguments))
    for result in results:
        for width, arrays in result.items():
            shards_by_width.setdefault(width, []).append(arrays)
    return [
        Bucket(
            torch.from_numpy(np.concatenate([tokens for tokens, _ in shards_by_width[width]])),
            torch.from_numpy(np.concatenate([answer_mask for _, answer_mask in shards_by_width[width]])),
        )
        for width in sorted(shards_by_width)
    ]


def _single_threaded() -> None:
    """One thread for each process: there is a process for each core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _shard(
    tokenizer_json: str, seed: int, shard: int, count: int, facts: Facts, style: Style | None
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    opening = tokenizer.encode(ASSISTANT).ids
    end = tokenizer.token_to_id(END)
    padding = tokenizer.token_to_id(DOCUMENT_END)
    rows: dict[int, list[list[int]]] = {}
    for encoding in tokenizer.encode_batch_fast(texts(seed, shard, count, facts, style)):
        ids = encoding.ids
        if len(ids) <= CONTEXT:
            rows.setdefault(int(WIDTHS[np.searchsorted(WIDTHS, len(ids))]), []).append(ids)
    arrays = {}
    for width, group in rows.items():
        tokens = np.full((len(group), width), padding, np.int16)
        for row, ids in enumerate(group):
            tokens[row, : len(ids)] = ids
        arrays[width] = tokens, answers(tokens, opening, end)
    return arrays


def answers(tokens: np.ndarray, opening: list[int], end: int) -> np.ndarray:
    """[rows, width] bool: the tokens of answers, after the opening and up to and including the end token."""
    answer_mask = np.zeros(tokens.shape, bool)
    inside = np.zeros(len(tokens), bool)
    for column in range(tokens.shape[1]):
        answer_mask[:, column] = inside
        inside &= tokens[:, column] != end
        if column + 1 >= len(opening):
            inside |= (tokens[:, column + 1 - len(opening) : column + 1] == opening).all(axis=1)
    return answer_mask


def batches(
    buckets: list[Bucket], tokens_per_batch: int, generator: torch.Generator
) -> Iterator[tuple[int, torch.Tensor]]:
    """One epoch in random order: pairs of bucket number and row numbers."""
    selections = []
    for number, bucket in enumerate(buckets):
        rows = max(1, tokens_per_batch // bucket.tokens.shape[1])
        order = torch.randperm(len(bucket.tokens), generator=generator)
        selections += [(number, order[start : start + rows]) for start in range(0, len(order), rows)]
    for index in torch.randperm(len(selections), generator=generator).tolist():
        yield selections[index]
