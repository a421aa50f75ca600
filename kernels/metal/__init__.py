"""Kernels for Apple's GPUs, as sources that MLX compiles when they are first called.

None has ever run on one: they are off unless LOCALLLM_METAL_KERNELS is 1, and each stands behind an op whose reference
is plain MLX. Rope with the write into the pool of pages is not among them: mlx-lm's layers turn their keys before they
hand them to a cache, and rows write to groups, which a pool takes over only when somebody else is to read them
(backends/mlx/residents.py). Such a kernel's answers are also always new arrays, so it could only write a copy.
"""
