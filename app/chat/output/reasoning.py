"""Tells whether a prompt ends inside reasoning."""

from __future__ import annotations

from ..calls.records import Reasoning


def is_open(text: str, reasoning: Reasoning) -> bool:
    """Whether the last marker of reasoning in a text is the one that begins it."""
    return text.rfind(reasoning.begin.strip()) > text.rfind(reasoning.end.strip())


def closed(text: str, reasoning: Reasoning) -> str:
    """A prompt that ends inside reasoning, with the marker that ends it."""
    return f"{text.rstrip()}\n\n{reasoning.end.strip()}\n\n"
