"""Attention by FlashInfer (https://github.com/flashinfer-ai/flashinfer), an optional dependency."""
