"""GLM 4.7 Flash: the latent attention and the experts of DeepSeek V3."""

from __future__ import annotations

from .deepseek_v3 import build

__all__ = ["build"]
