"""Command R: as Command R7B, with a rope in every layer and without windows."""

from __future__ import annotations

from .cohere2 import build

__all__ = ["build"]
