"""Kernels for Apple's GPUs, as sources that MLX compiles when they are first called.

None has ever run on one, and no step calls one. Each has a reference in plain MLX, which judges its source as C++.
"""
