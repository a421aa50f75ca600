"""Kernels for NVIDIA GPUs, as sources that MLX's CUDA device compiles when they are first called.

Each stands behind an op whose reference is plain MLX, which every other device computes.
"""
