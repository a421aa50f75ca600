"""Qwen 3: Llama with a norm on each query and key head (the default of ModelConfig)."""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
