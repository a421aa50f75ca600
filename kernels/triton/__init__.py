"""Kernels in Triton, for GPUs that have a torch with Triton. Wrappers have the signatures of kernels/ops."""

from __future__ import annotations

import torch

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})  # what the kernels compute with
