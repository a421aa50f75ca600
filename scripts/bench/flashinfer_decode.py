"""The decode attention of FlashInfer over the same pages, if it is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from localllm.kernels.ops.attention import Rows

WORKSPACE = 128 << 20  # bytes, the size that FlashInfer recommends

Calls = list[Callable[[], object]]


def decode(sets: Sequence[Mapping[str, Any]]) -> Mapping[str, Calls]:
    """Planned calls of both implementations by name; none for prompts, or if FlashInfer is not installed."""
    try:
        from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
    except ImportError:
        return {}
    if max(sets[0]["rows"].query_lens) > 1:
        return {}
    by_name = {}
    for name, tensor_cores in (("flashinfer", False), ("flashinfer, tensor cores", True)):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(_workspace(tensor_cores), "NHD", use_tensor_cores=tensor_cores)
        try:
            _plan(wrapper, sets[0])
            calls: Calls = [partial(_run, wrapper, arguments) for arguments in sets]
            calls[0]()
        except (RuntimeError, ValueError):  # this number of heads is not supported
            continue
        by_name[name] = calls
    return by_name


@cache
def _workspace(tensor_cores: bool) -> torch.Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")


def _plan(wrapper: Any, arguments: Mapping[str, Any]) -> None:
    rows: Rows = arguments["rows"]
    size, kv_heads, dim = arguments["key_pages"].shape[1:]
    needed = [-(-context // size) for context in rows.contexts]
    indices = torch.cat([row[:count] for row, count in zip(rows.page_table, needed, strict=True)])
    starts = torch.tensor([0, *needed]).cumsum(0).int()
    last = torch.tensor([(context - 1) % size + 1 for context in rows.contexts], dtype=torch.int32)
    wrapper.plan(
        *(starts, indices, last, arguments["query"].shape[1], kv_heads, dim, size),
        window_left=arguments["window"] - 1 if arguments["window"] else -1,
        q_data_type=arguments["query"].dtype,
        kv_data_type=arguments["key_pages"].dtype,
        sm_scale=arguments["scale"],
    )


def _run(wrapper: Any, arguments: Mapping[str, Any]) -> object:
    return wrapper.run(arguments["query"], (arguments["key_pages"], arguments["value_pages"]))
