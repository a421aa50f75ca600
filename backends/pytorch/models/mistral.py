"""Mistral: Llama with, in some releases, a sliding window on every layer (config.json says)."""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
