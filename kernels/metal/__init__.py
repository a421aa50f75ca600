"""Kernels for Apple's GPUs, as sources that MLX compiles when they are first called.

None has ever run on one: they are off unless LOCALLLM_METAL_KERNELS is 1, and each stands behind an op whose reference
is plain MLX. The pages of a pool are not what rope_store writes to: rows write to the caches that attention reads, and
a page takes over what they hold when somebody else is to read it (backends/mlx/holders.py).
"""
