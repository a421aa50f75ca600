"""OLMo 3: OLMo 2 with a sliding window in most layers, which have a rope of their own."""

from __future__ import annotations

from .olmo2 import build

__all__ = ["build"]
