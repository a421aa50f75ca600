"""Mistral: the same model as Llama. Some releases set a sliding window for all layers in config.json."""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
