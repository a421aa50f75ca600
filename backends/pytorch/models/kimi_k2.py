"""Kimi K2: DeepSeek V3 with other sizes."""

from __future__ import annotations

from .deepseek_v3 import build

__all__ = ["build"]
