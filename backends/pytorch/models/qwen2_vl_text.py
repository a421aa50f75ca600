"""The text model of Qwen 2 VL: Qwen 2 with a multimodal rope, which equals the default rope for text."""

from __future__ import annotations

from .qwen2 import build

__all__ = ["build"]
