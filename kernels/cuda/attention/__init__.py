"""Attention over the paged cache on CUDA devices."""
