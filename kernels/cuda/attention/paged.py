"""Attention over the paged cache in CUDA C++: decode (decode.cu) and prefill, with wgmma on Hopper
(prefill.py) or with mma.sync (prefill_mma.py). Triton computes all other cases, or the reference if
Triton is not installed."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ...compiled.arguments import attention_arguments
from ...gpu.attention import Limits, is_power_of_two
from ...ops.attention import Attend, Rows
from ...triton.problem import triton_problem
from . import prefill, prefill_mma

if triton_problem():
    from ...ops.attention import paged_attention as fallback
else:
    from ...triton.attention import paged_attention as fallback

_decode = torch.ops.localllm.decode_attention.default

PREFILL = (prefill, prefill_mma)  # the fastest first
# The largest group is as in decode.h.
LIMITS = Limits(dims=(64, 80, 96, 128, 192, 256), group=8, page_size=is_power_of_two, fp8_step=8)
MAX_PAIRS = 1 << 16  # largest number of pairs of a row and a kv head


def paged_attention(query: Tensor, rows: Rows, attend: Attend, out: Tensor | None = None) -> Tensor:
    """See kernels/ops/attention.py. Concurrent calls on two streams are safe."""
    decodes = 1 in rows.query_lens and LIMITS.fit(query, attend) and _has_counters(rows, attend)
    only_decode = decodes and max(rows.query_lens) == 1
    kernel = None if only_decode else _prefill_kernel(query, rows, attend)
    if kernel is None and not only_decode:
        return fallback(query, rows, attend, out)
    out = query.new_empty(query.shape) if out is None else out
    if kernel is not None:
        kernel.prefill(out, query, rows, attend, min_queries=2 if decodes else 1)
    if decodes:
        _decode(out, query, *attention_arguments(rows, attend))
    return out


def _prefill_kernel(query: Tensor, rows: Rows, attend: Attend) -> ModuleType | None:
    return next((kernel for kernel in PREFILL if kernel.supports(query, rows, attend)), None)


def _has_counters(rows: Rows, attend: Attend) -> bool:
    return len(rows.query_lens) * attend.kv_heads <= MAX_PAIRS
