"""Computes teacher-forced log-probabilities through a runner, with captured steps or without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from localllm.engine.runner import Runner

from .batches import Row, make_batch
from .tiny import VOCAB, Tiny


def logprobs(runner: Runner, rows: Sequence[Row]) -> Tensor:
    """Log-probabilities [rows, vocab] of the token after each row."""
    batch = make_batch(rows, runner.spec.vocab_size, groups=len(runner.spec.groups))
    every = replace(batch.sampling, logprobs=np.full(len(rows), VOCAB, np.int32))
    result = runner.run(replace(batch, sampling=every)).result()
    assert result.top_tokens is not None
    assert result.top_logprobs is not None
    order, values = (torch.from_numpy(part.copy()) for part in (result.top_tokens, result.top_logprobs))
    return torch.full((len(rows), VOCAB), float("nan")).scatter_(1, order.long(), values)


def forced(runner: Runner, prompts: Sequence[Sequence[int]]) -> tuple[list[tuple[int, int]], Tensor]:
    """((prompt, position) of each sample, [samples, vocab]) of two prompts of one length: whole, in chunks, one token
    at a time beside each other, beside a chunk, and behind a cached beginning."""
    size, length = runner.spec.groups[0].page_size, len(prompts[0])
    many = -(-length // size)
    pages = [range(1 + row * many, 1 + (row + 1) * many) for row in range(4)]
    places: list[tuple[int, int]] = []
    actual: list[Tensor] = []

    def step(*parts: tuple[int, int, int, Sequence[int]]) -> None:
        """One step; each row is a prompt, its first and last position, and its pages. The last page has the number of
        the sequence, which is the slot of its recurrent state."""
        rows = [Row(prompts[one][at:end], at, own, state=(own[-1] - 1) // many) for one, at, end, own in parts]
        places.extend((one, end - 1) for one, _, end, _ in parts)
        actual.append(logprobs(runner, rows))

    begun = min(length - 9, runner.spec.max_tokens)
    for at, end in pairwise([*range(0, length, runner.spec.max_tokens), length]):
        step((0, at, end, pages[0]))
    for at, end in pairwise([*range(0, begun, 11), begun]):
        step((1, at, end, pages[1]))
    shared = begun // size * size
    cached = [*pages[0][: shared // size], *pages[2][shared // size :]]
    if shared and runner.spec.num_states:  # the pages of a cached beginning have no state
        step((0, 0, shared, cached))
    for at in range(shared, begun):
        step((0, at, at + 1, cached))
    for at in range(begun, length - 3):
        step((1, at, at + 1, pages[1]), (0, at, at + 1, cached))
    step((1, length - 3, length - 2, pages[1]), (0, 0, 5, pages[3]), (0, length - 3, length, cached))
    step((1, length - 2, length - 1, pages[1]))
    return places, torch.cat(actual)


def prompts_of(shape: Tiny) -> list[list[int]]:
    return torch.randint(3, VOCAB, (2, shape.length), generator=torch.Generator().manual_seed(3)).tolist()


def expected(shape: Tiny, folder: Path, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Save the model in `dtype`. Returns the float32 logits of transformers for both prompts, each [tokens, vocab]."""
    saved = shape.save(folder, dtype)  # and rounds its own rotary frequencies with the weights: read it anew
    # Some releases of transformers select torch's fused attention for Gemma 2, which ignores the soft cap.
    model = (
        type(saved)
        .from_pretrained(folder, config=saved.config, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0] for prompt in prompts_of(shape)]


def difference(runner: Runner, shape: Tiny, logits: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(errors of the runner's log-probabilities, expected log-probabilities), each [samples, vocab]."""
    places, actual = forced(runner, prompts_of(shape))
    right = torch.stack([logits[prompt][position] for prompt, position in places]).log_softmax(-1)
    return actual - right, right
