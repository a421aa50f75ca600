"""Sizes in bytes as text for people."""

from __future__ import annotations


def size(count: float) -> str:
    """A number of bytes as text with a unit (B, KiB, MiB, …), for example 28.9 MiB."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"
