"""Drawing tokens on the CPU (greedy.cpp, draw.cpp); kernels/ops/sampling.py defines it."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import sampling as reference
from ...ops.sampling import Draws, Logprobs

_greedy = torch.ops.localllm.greedy.default
_draw = torch.ops.localllm.draw.default
_mask = torch.ops.localllm.mask.default
_logprob = torch.ops.localllm.logprob.default


def mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    if logits.dtype == torch.float32:
        _mask(logits, rows, words)
    else:
        reference.mask(logits, rows, words)


def greedy(logits: Tensor) -> Tensor:
    if logits.dtype != torch.float32:
        return reference.greedy(logits)
    tokens = logits.new_empty(len(logits), dtype=torch.int64)
    _greedy(tokens, logits)
    return tokens


def draw(logits: Tensor, draws: Draws) -> Tensor:
    if logits.dtype != torch.float32:
        return reference.draw(logits, draws)
    tokens = logits.new_empty(len(logits), dtype=torch.int64)
    _draw(tokens, logits, *draws[:-1])  # the kernel does not need `max_k`
    return tokens


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
    if logits.dtype != torch.float32:
        return reference.logprobs(logits, tokens, k)
    chosen, normaliser = logits.new_empty(2, len(logits))
    _logprob(chosen, normaliser, logits, tokens)
    if k == 0:
        return Logprobs(chosen, tokens.new_empty(len(tokens), 0), logits.new_empty(len(tokens), 0))
    likeliest = [_likeliest(row, min(k, len(row))) for row in logits]
    top_tokens = torch.stack(likeliest) if likeliest else tokens.new_empty(0, min(k, logits.shape[1]))
    return Logprobs(chosen, top_tokens, logits.gather(1, top_tokens) - normaliser.unsqueeze(1))


def _likeliest(row: Tensor, k: int) -> Tensor:
    """The k likeliest tokens of logits [vocab]; among equal logits the smallest id first, unlike topk."""
    least = row.topk(k).values[-1]
    ids = (~(row < least)).nonzero().squeeze(1)  # in ascending order; NaN counts as the largest logit, as in topk
    return ids[row[ids].argsort(descending=True, stable=True)[:k]]
