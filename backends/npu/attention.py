"""Attention over the pages of the KV cache.

The kernels get the context lengths as lists of host numbers: `recorder.py` gives captured kernels the lists of each
step. They read pages as [pages, page_size, kv heads * dim], which the cache is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...kernels.ops.attention import Attend, Attention, RowRun, Rows, paged_attention

MASK_SIZE = 2048  # of the triangle that stands for every causal mask
PER_HEAD = 5  # mode of int8 pages: scales for each head of a token, in pages
CAUSAL, BAND = 3, 4  # sparse modes: aligned to the last query and the last key; BAND also has a window
DIM_UNIT, INT8_UNIT, MAX_DIM = 16, 32, 512
MAX_GROUP = 64  # query heads per kv head
MAX_WIDTH = 65535  # heads * dim of the queries, and of the keys
PAGE_UNIT, MAX_PAGE = 128, 512
ATB_DIM, ATB_PAGE = 256, 128
# The arguments that have other names in the first version of the op.
V1_NAMES = {
    "num_query_heads": "num_heads",
    "softmax_scale": "scale",
    "actual_seq_kvlen": "actual_seq_lengths_kv",
    "return_softmax_lse": "softmax_lse_flag",
    "dequant_scale_key": "key_antiquant_scale",
    "dequant_scale_value": "value_antiquant_scale",
    "key_quant_mode": "key_antiquant_mode",
    "value_quant_mode": "value_antiquant_mode",
}
# Bytes of a prefill step for each key number in the int8 pages of a row: the bfloat16 keys and values (2 each), and for
# the values the int8 numbers (1) and their float32 products (4).
INT8_COPY = 9
RAGGED_DIM = 128  # dimension of the heads of a call with rows of different lengths


def is_supported(query: Tensor, attend: Attend) -> bool:
    """Whether the kernels compute this attention, by their documentation."""
    _, heads, dim = query.shape
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and attend.key_pages.dtype in (query.dtype, torch.int8)
        and not attend.soft_cap
        and dim % (INT8_UNIT if attend.scales is not None else DIM_UNIT) == 0
        and dim <= MAX_DIM
        and heads <= MAX_GROUP * attend.kv_heads
        and heads * dim < MAX_WIDTH
        and attend.page_size % PAGE_UNIT == 0
        and attend.page_size <= MAX_PAGE
    )


def _fused(*tensors: Tensor, **arguments: Any) -> Any:
    return torch.ops.npu.npu_fused_infer_attention_score_v2(*tensors, **arguments)


def _fused_v1(*tensors: Tensor, **arguments: Any) -> Any:
    """The first version of the op, with the names of the second."""
    named = {V1_NAMES.get(name, name): value for name, value in arguments.items()}
    return torch.ops.npu.npu_fused_infer_attention_score(*tensors, **named)


def by_length(
    query: Tensor, rows: Rows, attend: Attend, out: Tensor | None = None, fused: Callable[..., Any] = _fused
) -> Tensor:
    """See kernels.ops.attention.paged_attention. One call for neighbouring rows with the same number of queries."""
    if not is_supported(query, attend):
        return paged_attention(query, rows, attend, out)
    return _joined([_attend_run(query, rows, run, attend, fused) for run in _runs(rows, attend)], out)


def _runs(rows: Rows, attend: Attend) -> Iterator[RowRun]:
    """The calls of a step. Rows whose int8 pages are converted are apart, so that one copy is in memory at a time."""
    for run in rows.runs():
        if run.queries == 1 or attend.scales is None:
            yield run
            continue
        starts = range(run.tokens.start, run.tokens.stop, run.queries)
        for row, start in enumerate(starts, run.rows.start):
            yield RowRun(slice(row, row + 1), slice(start, start + run.queries), run.queries)


def ragged(query: Tensor, rows: Rows, attend: Attend, out: Tensor | None = None) -> Tensor:
    """As `by_length`, with one call for all rows of a prefill step. The documentation excludes pages from such a call
    (input_layout TND), but SGLang and vLLM make it."""
    is_prefill = min(rows.query_lens) > 1 or (max(rows.query_lens) > 1 and not attend.window)
    is_ragged = is_prefill and attend.scales is None and query.dtype == torch.bfloat16 and query.shape[2] == RAGGED_DIM
    if not (is_ragged and is_supported(query, attend)):
        return by_length(query, rows, attend, out)
    attended, scores = _fused(
        query.contiguous(),
        *_pages(attend),
        **_constants(query, attend),
        **causal_mask(query, attend.window),
        block_table=rows.page_table,
        actual_seq_qlen=list(accumulate(rows.query_lens)),
        actual_seq_kvlen=list(rows.contexts),
        input_layout="TND",
    )
    if attend.sinks is not None:
        attended = _with_sinks(attended, scores, attend.sinks)
    return _joined([attended], out)


def by_pages(query: Tensor, rows: Rows, attend: Attend, out: Tensor | None = None) -> Tensor:
    """As `by_length`, with the op of the library ATB for decode steps."""
    is_decode = max(rows.query_lens) == 1 and not attend.window and attend.sinks is attend.scales is None
    is_small = query.shape[2] <= ATB_DIM and attend.page_size <= ATB_PAGE
    if not (is_decode and is_small and is_supported(query, attend)):
        return by_length(query, rows, attend, out)
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    torch.ops.atb._npu_paged_attention(
        query.contiguous(),
        attend.key_pages,
        attend.value_pages,
        attend.kv_heads,
        query.shape[1],
        attend.scale,
        rows.page_table,
        torch.tensor(rows.contexts, dtype=torch.int32),
        out,
    )
    return out


def _attend_run(query: Tensor, rows: Rows, run: RowRun, attend: Attend, fused: Callable[..., Any]) -> Tensor:
    """The outputs [tokens, heads, dim] of the rows of a run. The layout is BSND, which pages support."""
    table = rows.page_table[run.rows]
    contexts = rows.contexts[run.rows]
    if run.queries > 1 and attend.scales is not None:
        attend, table = _dequantised(attend, table[:, : -(-max(contexts) // attend.page_size)], query.dtype)
    if run.queries > 1:
        mask = causal_mask(query, attend.window)
    elif attend.window and attend.window < max(contexts):
        mask = {"atten_mask": _window_mask(rows.context_lens[run.rows], table.shape[1] * attend.page_size, attend)}
    else:
        mask = {}
    attended, scores = fused(
        query[run.tokens].contiguous().view(len(contexts), run.queries, *query.shape[1:]),
        *_pages(attend),
        **_constants(query, attend),
        **mask,
        block_table=table.contiguous(),
        actual_seq_kvlen=list(contexts),
        input_layout="BSND",
    )
    output: Tensor = attended.flatten(0, 1)
    if attend.sinks is None:
        return output
    return _with_sinks(output, scores.transpose(1, 2).flatten(0, 1), attend.sinks)  # [rows, heads, queries, 1]


def _pages(attend: Attend) -> tuple[Tensor, Tensor]:
    """The pages of the keys and of the values, [pages, page_size, kv heads * dim]."""
    return attend.key_pages.flatten(2), attend.value_pages.flatten(2)


def _constants(query: Tensor, attend: Attend) -> dict[str, Any]:
    """The arguments that are the same in every step."""
    return {
        "num_query_heads": query.shape[1],
        "num_key_value_heads": attend.kv_heads,
        "softmax_scale": attend.scale,
        "block_size": attend.page_size,
        "return_softmax_lse": attend.sinks is not None,
        **_scales(attend),
    }


def _scales(attend: Attend) -> dict[str, Any]:
    """The arguments of int8 pages."""
    if attend.scales is None:
        return {}
    key, value = attend.scales
    modes = {"key_quant_mode": PER_HEAD, "value_quant_mode": PER_HEAD}
    return {"dequant_scale_key": key, "dequant_scale_value": value, **modes}


def _dequantised(attend: Attend, table: Tensor, dtype: torch.dtype) -> tuple[Attend, Tensor]:
    """The pages of a table [rows, pages] as floats, and a table of them. The documentation of the op excludes int8
    pages from calls with more than one query: "page attention不支持伪量化场景"."""
    assert attend.scales is not None
    pages = table.flatten().long()
    scales = attend.scales.index_select(1, pages).transpose(2, 3).unsqueeze(4)  # [2, pages, page_size, heads, 1]
    integers = (part.index_select(0, pages) for part in (attend.key_pages, attend.value_pages))
    key, value = ((part * scale).to(dtype) for part, scale in zip(integers, scales, strict=True))
    places = torch.arange(table.numel(), dtype=torch.int32, device=table.device).view(table.shape)
    return attend._replace(key_pages=key, value_pages=value, scales=None), places


def causal_mask(query: Tensor, window: int) -> dict[str, Any]:
    """The arguments that mask the positions after each query, and those before its window."""
    triangle = {"atten_mask": _triangle(query.device)}
    if not window:
        return triangle | {"sparse_mode": CAUSAL}
    return triangle | {"sparse_mode": BAND, "pre_tokens": window - 1, "next_tokens": 0}


@cache
def _triangle(device: torch.device) -> Tensor:
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu(1)


def _window_mask(context_lens: Tensor, length: int, attend: Attend) -> Tensor:
    """[rows, 1, 1, length] bool: True at the positions before the window of a single query, for which the kernel
    ignores pre_tokens."""
    starts = (context_lens - attend.window).view(-1, 1, 1, 1)
    return torch.arange(length, device=context_lens.device) < starts


def _with_sinks(attended: Tensor, scores: Tensor, sinks: Tensor) -> Tensor:
    """attended [tokens, heads, dim] with the sinks [heads] in the denominators of its softmax. `scores` [tokens, heads,
    1] float32 are the logarithms of the denominators without sinks."""
    share = torch.sigmoid(scores - sinks.view(-1, 1))
    return (attended * share).to(attended.dtype)


def _joined(outputs: list[Tensor], out: Tensor | None) -> Tensor:
    """The outputs of all rows, in `out` if it is not None."""
    if out is None:
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return torch.cat(outputs, out=out)


ATTENTION = Attention(paged=by_length)
# Names in the setting `attention` -> other implementations.
OTHERS: dict[str, Callable[..., Tensor]] = {
    "ragged": ragged,
    "pages": by_pages,
    "fused_v1": partial(by_length, fused=_fused_v1),
}
