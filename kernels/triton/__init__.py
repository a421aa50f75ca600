"""Triton kernels, for every GPU whose torch includes Triton. Wrappers have the signatures of kernels/ops."""

from __future__ import annotations

import os

# The kernels are tuned and tested with fused multiply-adds. Without this variable Triton 3.9 warns, and Triton 3.10
# does not fuse.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
