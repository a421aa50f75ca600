"""Qwen 3.5 and 3.6 with experts, the text model: Qwen3-Next with separate input projections."""

from __future__ import annotations

from .qwen3_next import build

__all__ = ["build"]
