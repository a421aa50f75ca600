"""Tells whether a prompt ends inside reasoning."""

from __future__ import annotations


def is_open(text: str, begin: str, end: str) -> bool:
    """Whether the last marker of reasoning in a text is the one that begins it."""
    return text.rfind(begin.strip()) > text.rfind(end.strip())


def closed(text: str, end: str) -> str:
    """A prompt that ends inside reasoning, with the marker that ends it."""
    return f"{text.rstrip()}\n\n{end.strip()}\n\n"
