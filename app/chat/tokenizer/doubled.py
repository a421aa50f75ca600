"""Finds special tokens that a prompt has twice: a text may contain the token that the tokenizer adds, too."""

from __future__ import annotations

from collections.abc import Sequence

from .base import Tokenizer


def added_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer adds before and after a raw prompt."""
    text = "a"
    plain = tokenizer.encode(text, add_special_tokens=False)
    full = tokenizer.encode(text, add_special_tokens=True)
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    return [], []


def doubled(ids: Sequence[int], begin: Sequence[int], end: Sequence[int]) -> list[tuple[str, int]]:
    """("begins" or "ends", id) of the tokens that the ids have twice. `begin`, `end`: the tokens around each prompt."""
    tokens = []
    if begin and list(ids[len(begin) - 1 : len(begin) + 1]) == [begin[-1]] * 2:
        tokens.append(("begins", begin[-1]))
    rest = ids[len(begin) :]
    if end and list(rest[len(rest) - len(end) - 1 : len(rest) - len(end) + 1]) == [end[0]] * 2:
        tokens.append(("ends", end[0]))
    return tokens
