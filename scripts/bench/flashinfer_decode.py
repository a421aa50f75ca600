"""FlashInfer's decode attention over the same pages, where it is installed, as a peer of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from localllm.kernels.ops.attention import Rows

WORKSPACE = 128 << 20  # bytes, what it recommends

Calls = list[Callable[[], object]]


def decode(sets: Sequence[Mapping[str, Any]]) -> Mapping[str, Calls]:
    """By name, calls of its two implementations, planned; none for prompts, or where it is not installed."""
    try:
        from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
    except ImportError:
        return {}
    if max(sets[0]["rows"].query_lens) > 1:
        return {}
    found = {}
    for name, tensor_cores in (("flashinfer", False), ("flashinfer, tensor cores", True)):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(_workspace(tensor_cores), "NHD", use_tensor_cores=tensor_cores)
        try:
            _plan(wrapper, sets[0])
            calls: Calls = [partial(_run, wrapper, one) for one in sets]
            calls[0]()
        except (RuntimeError, ValueError):  # not for this many heads
            continue
        found[name] = calls
    return found


@cache
def _workspace(tensor_cores: bool) -> torch.Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")


def _plan(wrapper: Any, one: Mapping[str, Any]) -> None:
    rows: Rows = one["rows"]
    size, kv_heads, dim = one["key_pages"].shape[1:]
    needed = [-(-context // size) for context in rows.contexts]
    indices = torch.cat([row[:count] for row, count in zip(rows.page_table, needed, strict=True)])
    starts = torch.tensor([0, *needed]).cumsum(0).int()
    last = torch.tensor([(context - 1) % size + 1 for context in rows.contexts], dtype=torch.int32)
    wrapper.plan(
        *(starts, indices, last, one["query"].shape[1], kv_heads, dim, size),
        window_left=one["window"] - 1 if one["window"] else -1,
        q_data_type=one["query"].dtype,
        kv_data_type=one["key_pages"].dtype,
        sm_scale=one["scale"],
    )


def _run(wrapper: Any, one: Mapping[str, Any]) -> object:
    return wrapper.run(one["query"], (one["key_pages"], one["value_pages"]))
