"""The text model of Qwen 3 VL: Qwen 3 with a multimodal rope, which equals the default rope for text."""

from __future__ import annotations

from .qwen3 import build

__all__ = ["build"]
