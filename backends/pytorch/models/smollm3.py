"""SmolLM3: Llama with a rope in most layers only. Layers without a rope are a part of ModelConfig."""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
