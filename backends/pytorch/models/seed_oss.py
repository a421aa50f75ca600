"""Seed-OSS: Llama with biases on queries, keys and values (the default of ModelConfig)."""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
