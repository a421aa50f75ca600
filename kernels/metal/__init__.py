"""Kernels for Apple's GPUs, as sources that MLX compiles when they are first called.

No kernel of this folder has run on a GPU of Apple yet, and no step calls one. The tests compile each source as C++ and
compare its results with a reference in plain MLX.
"""
