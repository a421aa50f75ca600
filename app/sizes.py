"""Sizes in bytes as text for people."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes as text in powers of 1024, for example 28.9 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
