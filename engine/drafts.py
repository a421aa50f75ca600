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
    """Proposes tokens, e.g. by a search for the last tokens in the prompt."""

    def propose(self, tokens: list[int], limit: int) -> list[int]:
        """At most `limit` tokens that probably follow `tokens`, in order."""
        ...


def usable(drafts: list[int], stop_ids: frozenset[int], vocab_size: int) -> tuple[int, ...]:
    """The drafts before the first stop id or invalid id. A sequence ends at a stop id, so no later answer is needed."""
    for index, draft in enumerate(drafts):
        if draft in stop_ids or not 0 <= draft < vocab_size:
            return tuple(drafts[:index])
    return tuple(drafts)


def follow(
    grammar: Grammar, mask: NDArray[np.uint32], drafts: tuple[int, ...], vocab_size: int
) -> tuple[tuple[int, ...], tuple[NDArray[np.uint32], ...]]:
    """The drafts that the grammar allows, and the mask of the answer after each.

    `mask` has the allowed tokens of the answer before the first draft. A draft that ends the text is left out, as in
    `usable`. If the grammar fails at a draft, the drafts before it stay: the failure is reported when they are drawn.
    """
    matcher = grammar.copy()
    masks: list[NDArray[np.uint32]] = []
    for draft in drafts:
        allowed = int(mask[draft // 32]) >> (draft % 32) & 1
        if not allowed:
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
