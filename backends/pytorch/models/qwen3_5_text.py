"""Qwen 3.5, the text model: Qwen3-Next with separate input projections and dense MLPs."""

from __future__ import annotations

from .qwen3_next import build

__all__ = ["build"]
