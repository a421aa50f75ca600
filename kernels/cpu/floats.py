"""What the kernels of the CPU compute with; other types are left to the references."""

from __future__ import annotations

import torch

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
