"""Mixtures of experts on CUDA devices."""
