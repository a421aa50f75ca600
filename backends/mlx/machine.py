"""Memory of the machine that MLX runs on, without MLX."""

from __future__ import annotations

import psutil


def memory() -> tuple[int, int]:
    """(all, free) bytes; MLX computes from the machine's own memory, GPU or not."""
    found = psutil.virtual_memory()
    return found.total, found.available
