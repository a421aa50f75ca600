"""Attention by FlashInfer, a library of others (https://github.com/flashinfer-ai/flashinfer), where it is installed."""
