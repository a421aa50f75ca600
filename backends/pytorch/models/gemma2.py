"""Gemma 2: the norms of Gemma 3 without norms of heads, soft caps for attention and logits, and a sliding window in
every second layer."""

from __future__ import annotations

from .gemma3_text import build

__all__ = ["build"]
