"""Attention over the paged cache by FlashInfer. kernels/ops/attention.py has the reference.

FlashInfer plans a step on the host from exact lengths, once for all layers with the same options and rows. So a graph
cannot capture a whole step. The kernels of localllm compute what FlashInfer does not support: sinks, head dims that are
not in DIMS, float32 and an fp8 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from ..ops.attention import Attend, Attention, Rows

WORKSPACE = 128 << 20  # bytes, the size that FlashInfer recommends
DIMS = (64, 128, 256)
TYPES = (torch.bfloat16, torch.float16)
IN_FLIGHT = 3  # planners of a ring, so at most this number of copies to the device are pending


def attention(fallback: Attention) -> Attention:
    """Attention by FlashInfer if it supports the arguments, else by `fallback`."""

    def paged_attention(query: Tensor, rows: Rows, attend: Attend, out: Tensor | None = None) -> Tensor:
        if not rows.exact or not _supported(query, attend):
            return fallback.paged(query, rows, attend, out)
        options = (
            *(query.shape[1], *attend.key_pages.shape[1:], query.dtype, query.device),
            *(attend.scale, attend.window, attend.soft_cap),
        )
        key = "flashinfer", options
        if key not in rows.plans:
            rows.plans[key] = _planned(rows, options)
        result: Tensor = rows.plans[key].run(query, (attend.key_pages, attend.value_pages), out=out)
        return result

    return replace(fallback, paged=paged_attention)


def _supported(query: Tensor, attend: Attend) -> bool:
    key_pages = attend.key_pages
    return (
        attend.sinks is None
        and query.dtype in TYPES
        and key_pages.dtype == query.dtype
        and query.shape[2] in DIMS
        and query.stride(2) == 1
        and key_pages.stride() == attend.value_pages.stride()
        and key_pages.is_contiguous()
    )


class Ring:
    """Several planners, used in rotation. A plan is copied asynchronously from the host memory of its planner; the next
    plan must not overwrite it before the copy is complete."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._planners = [(make(), torch.cuda.Event()) for _ in range(IN_FLIGHT)]

    def plan(self, *arguments: Any, **options: Any) -> Any:
        """Plan a step with the next planner, and return the planner."""
        planner, done = self._planners[0]
        self._planners = [*self._planners[1:], self._planners[0]]
        done.synchronize()
        planner.plan(*arguments, **options)
        done.record()
        return planner


@cache
def _ring(options: Hashable, device: torch.device) -> Ring:
    return Ring(lambda: BatchPrefillWithPagedKVCacheWrapper(_workspace(device), "NHD", backend="fa2"))


@cache
def _workspace(device: torch.device) -> Tensor:
    """[WORKSPACE] uint8, shared by all calls on a device, which run in order."""
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)


def _planned(rows: Rows, options: tuple[Any, ...]) -> Any:
    heads, size, kv_heads, dim, dtype, device, scale, window, soft_cap = options
    contexts = np.array(rows.contexts)
    pages = -(-contexts // size)
    starts = np.concatenate([[0], pages.cumsum()])
    width = rows.page_table.shape[1]
    # indices of each row's pages in the flattened page table
    indices = np.arange(starts[-1]) + np.repeat(np.arange(len(pages)) * width - starts[:-1], pages)
    queries = np.concatenate([[0], np.cumsum(rows.query_lens)])
    return _ring(options, device).plan(
        torch.from_numpy(queries.astype(np.int32)),
        torch.from_numpy(starts.astype(np.int32)),
        rows.page_table.flatten().index_select(0, torch.from_numpy(indices).to(device, non_blocking=True)),
        torch.from_numpy(((contexts - 1) % size + 1).astype(np.int32)),
        *(heads, kv_heads, dim, size),
        causal=True,
        sm_scale=scale,
        window_left=window - 1 if window else -1,
        logits_soft_cap=soft_cap or None,
        q_data_type=dtype,
        kv_data_type=dtype,
    )
