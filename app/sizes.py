"""Bytes for people: one way of writing them, whoever tells them."""

from __future__ import annotations


def size(count: float) -> str:
    """28.9 MiB. In powers of 1024, as the settings that end in `_mib` and what the backends say of memory."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
