"""Drafts: proposals for the next tokens of a sequence, which the step verifies.

A draft is accepted when the step draws the same token at its position. As draws depend on seed and position only, the
output with drafts equals the output without them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .grammar import Grammar, allowed_tokens


class Drafter(Protocol):
    """Proposes tokens, e.g. by looking up the last ones in the prompt."""

    def propose(self, tokens: list[int], limit: int) -> list[int]:
        """At most `limit` tokens that may follow `tokens`, in order; none without a good guess."""
        ...


def usable(drafts: list[int], stop_ids: frozenset[int], vocab_size: int) -> tuple[int, ...]:
    """The drafts before the first stop id: the sequence ends there, so no answer after it is needed."""
    for index, draft in enumerate(drafts):
        if draft in stop_ids or not 0 <= draft < vocab_size:
            return tuple(drafts[:index])
    return tuple(drafts)


def follow(
    grammar: Grammar, mask: NDArray[np.uint32], drafts: tuple[int, ...], vocab_size: int
) -> tuple[tuple[int, ...], tuple[NDArray[np.uint32], ...]]:
    """The drafts that the grammar allows, and the mask of the answer after each.

    `mask` is that of the answer before the first draft. A draft that ends the text is left out, as in `usable`. A
    grammar that fails on the way keeps the drafts before: the failure counts when these tokens are drawn.
    """
    matcher = grammar.copy()
    masks: list[NDArray[np.uint32]] = []
    for draft in drafts:
        if not mask[draft // 32] >> np.uint32(draft % 32) & np.uint32(1):
            break
        try:
            matcher.accept(draft)
            if matcher.finished:
                break
            mask = allowed_tokens(matcher, vocab_size)
        except Exception:  # foreign code
            break
        masks.append(mask)
    return drafts[: len(masks)], tuple(masks)
