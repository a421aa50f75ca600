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
    """Proposes the next tokens, e.g. the tokens that followed an earlier occurrence of the last tokens."""

    def propose(self, tokens: list[int], limit: int) -> list[int]:
        """At most `limit` tokens that probably follow `tokens`, in order."""
        ...


def usable(drafts: list[int], stop_ids: frozenset[int], vocab_size: int) -> tuple[int, ...]:
    """The drafts before the first stop id or invalid id. A sequence ends at a stop id, so later drafts are useless."""
    for index, draft in enumerate(drafts):
        if draft in stop_ids or not 0 <= draft < vocab_size:
            return tuple(drafts[:index])
    return tuple(drafts)


def follow(
    grammar: Grammar, mask: NDArray[np.uint32], drafts: tuple[int, ...], vocab_size: int
) -> tuple[tuple[int, ...], tuple[NDArray[np.uint32], ...]]:
    """(the first drafts that the grammar allows, the mask of allowed tokens after each of them).

    `mask` has the allowed tokens at the position of the first draft. A draft that ends the text is left out, as in
    `usable`. If the grammar fails at a draft, the drafts before it stay. The failure is reported later, when the
    sequence draws the failing token.
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
        except Exception:  # a grammar is foreign code
            break
        masks.append(mask)
    return drafts[: len(masks)], tuple(masks)
