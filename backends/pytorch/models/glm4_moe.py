"""GLM 4.5: partial rotary embedding; dense first layers, then layers with experts as in dots.llm1."""

from __future__ import annotations

from .dots1 import build

__all__ = ["build"]
