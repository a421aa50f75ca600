"""Ministral 3: Mistral with queries that grow with their positions. The factors are a part of ModelConfig."""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
