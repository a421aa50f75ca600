"""Mistral: Llama; some releases set a sliding window for every layer in config.json."""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
