"""Drawing tokens from logits. `engine/sampling.py` defines each operation in numpy; tests compare this file with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


class Draws(NamedTuple):
    """The sampling parameters of each row. All tensors are [rows]; a filter that is off in every row is None."""

    temperature: Tensor  # float32, 0 is greedy
    seed_low: Tensor  # int32, the lower 32 bits of the seed
    seed_high: Tensor  # int32, the higher 32 bits of the seed
    position: Tensor  # int32, draw position: it selects the row's noise together with the seed
    top_k: Tensor | None  # int32, 0 is off
    top_p: Tensor | None  # float32, 1 is off
    min_p: Tensor | None  # float32, 0 is off
    max_k: int  # logits to sort for top_k and top_p: the largest top_k, or vocab if a row has no top_k


class Logprobs(NamedTuple):
    """Natural logarithms of the probabilities, from the raw logits."""

    chosen: Tensor  # [rows] float32, of the drawn tokens
    top_tokens: Tensor  # [rows, k] int64, likeliest first, the smallest id first among equals
    top: Tensor  # [rows, k] float32, of `top_tokens`


def bias(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> None:
    """logits[rows[i], tokens[i]] += values[i], in place; pairs may repeat."""
    logits.index_put_((rows, tokens), values.to(logits.dtype), accumulate=True)


def penalise(
    logits: Tensor,
    rows: Tensor,
    tokens: Tensor,
    in_prompt: Tensor,
    in_output: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Apply the repetition penalty (Keskar et al., CTRL, 2019), then the frequency and presence penalties, in place.

    rows and tokens [pairs] are distinct pairs; in_prompt and in_output [pairs] count the token in the row's prompt and
    output. repetition, presence and frequency [rows of logits].
    """
    x = logits[rows, tokens]
    penalty = repetition[rows]
    x = torch.where((in_prompt > 0) | (in_output > 0), torch.where(x > 0, x / penalty, x * penalty), x)
    x = x - frequency[rows] * in_output - presence[rows] * (in_output > 0)
    logits.index_put_((rows, tokens), x.to(logits.dtype))


def mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Set the logits of all tokens whose bit is 0 to -inf, in place.

    rows [masked rows]; words [masked rows, ceil(vocab / 32)] int32: a token has bit token % 32 of word token // 32.
    """
    bits = words.unsqueeze(-1) >> torch.arange(32, device=words.device, dtype=words.dtype) & 1
    forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, float("-inf")))


def greedy(logits: Tensor) -> Tensor:
    """The token with the largest logit of each row, [rows] int64; among equal logits the smallest id."""
    return logits.argmax(-1)


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """Draw a token for each row, [rows] int64: apply temperature, top_k, top_p and min_p in this order, then take the
    token with the largest logit + Gumbel noise.

    The filters never remove the largest logit, so in a greedy row it suffices to leave out the noise. Logits are not
    changed.
    """
    is_greedy = draws.temperature == 0
    x = logits / torch.where(is_greedy, 1.0, draws.temperature).unsqueeze(-1)
    out = float("-inf")
    if draws.top_k is not None or draws.top_p is not None:
        largest = x.topk(draws.max_k).values  # descending
        if draws.top_k is not None:
            last = largest.gather(1, (draws.top_k.long() - 1).clamp(0, draws.max_k - 1).unsqueeze(-1))
            x = x.masked_fill((x < last) & (draws.top_k > 0).unsqueeze(-1), out)
        if draws.top_p is not None:
            p = (largest - x.logsumexp(-1, keepdim=True)).exp()
            in_nucleus = p.cumsum(-1) - p < draws.top_p.unsqueeze(-1)
            last = largest.gather(1, (in_nucleus.sum(-1, keepdim=True) - 1).clamp(min=0))
            x = x.masked_fill((x < last) & (draws.top_p < 1).unsqueeze(-1), out)
    if draws.min_p is not None:
        x = x.masked_fill(x < (x.amax(-1) + draws.min_p.log()).unsqueeze(-1), out)
    noise = _gumbel(draws.seed_low, draws.seed_high, draws.position, logits.shape[1])
    return (x + torch.where(is_greedy.unsqueeze(-1), 0.0, noise)).argmax(-1)


def _gumbel(seed_low: Tensor, seed_high: Tensor, position: Tensor, vocab: int) -> Tensor:
    key = torch.zeros_like(position, dtype=torch.int64)
    for word in (seed_low, seed_high, position):
        key = _mix((key ^ word.long()) + _GOLDEN)
    h = _mix((key.unsqueeze(-1) ^ torch.arange(vocab, device=key.device)) + _GOLDEN)
    u = (h >> 8 | 1).float() / 2**24
    return -torch.log(-torch.log(u))


def _mix(h: Tensor) -> Tensor:
    """The 32-bit finaliser of murmur3, computed in int64, because few devices support unsigned integers."""
    h = h & _WORD
    h ^= h >> 16
    h *= 0x85EBCA6B
    h &= _WORD
    h ^= h >> 13
    h *= 0xC2B2AE35
    h &= _WORD
    h ^= h >> 16
    return h


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """Log-probabilities of the drawn tokens [rows] and of the k likeliest tokens of each row."""
    all_tokens = logits.log_softmax(-1)
    chosen = all_tokens.gather(1, tokens.unsqueeze(-1)).squeeze(-1)
    if k == 0:
        return Logprobs(chosen, tokens.new_empty(len(tokens), 0), all_tokens[:, :0])
    # topk has no fixed order of equal values; a stable sort has.
    top, ids = all_tokens.sort(dim=-1, descending=True, stable=True)
    return Logprobs(chosen, ids[:, :k], top[:, :k])


def carry(tokens: Tensor, ends: Tensor, carried: Tensor, drawn: Tensor) -> None:
    """tokens[ends[r]] = drawn[carried[r]] for all carried[r] >= 0, in place: inserts the tokens of the previous step.

    All int32: tokens [tokens], ends and carried [rows], drawn [rows of the previous step].
    """
    unchanged = tokens.index_select(0, ends)
    tokens.index_copy_(
        0, ends.long(), torch.where(carried >= 0, drawn.index_select(0, carried.clamp(min=0)), unchanged)
    )


@dataclass(frozen=True, slots=True)
class Sampling:
    """The implementations of the sampling ops on a device."""

    carry: Callable[[Tensor, Tensor, Tensor, Tensor], None] = carry
    bias: Callable[..., None] = bias
    penalise: Callable[..., None] = penalise
    mask: Callable[..., None] = mask
    greedy: Callable[[Tensor], Tensor] = greedy
    draw: Callable[[Tensor, Draws], Tensor] = draw
    logprobs: Callable[[Tensor, Tensor, int], Logprobs] = logprobs
