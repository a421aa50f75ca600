"""Kernels for Apple's GPUs, as sources that MLX compiles when they are first called.

None has ever run on one: they are off unless LOCALLLM_METAL_KERNELS is 1, and each stands behind an op whose reference
is plain MLX. Rope with the write into the cache is not among them: such a kernel's answers are always new arrays, so it
could only write a copy of the cache.
"""
