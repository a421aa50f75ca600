"""Attention over the latent cache of MLA, which has the rotated keys and the latents apart (Device.latent_parts).

npu_mla_prolog_v3, which fuses the preparation, computes hidden sizes of 6,144, 7,168 and 7,680 with query latents of
1,536 only: DeepSeek-V3 and models of its size, which one NPU cannot hold. The products, norms and rotations are apart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.ops.attention import Rows
from ...kernels.ops.attention import latent_attention as reference
from .attention import causal_mask

# Shapes of the kernel, by its documentation.
RANK, ROTARY = 512, 64
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
PAGE_SIZES = (16, 128)
MAX_QUERIES = 16  # of a row


def is_supported(query: Tensor, pages: tuple[Tensor, ...]) -> bool:
    """Whether the kernel computes this attention."""
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and all(part.dtype == query.dtype for part in pages)
        and [part.shape[3] for part in pages] == [ROTARY, RANK]
        and query.shape[1] in HEADS
        and pages[0].shape[1] in PAGE_SIZES
    )


def latent_attention(
    query: Tensor, pages: tuple[Tensor, ...], rows: Rows, scale: float, start: int, out: Tensor | None = None
) -> Tensor:
    """See kernels.ops.attention.latent_attention. One call for all rows."""
    if not is_supported(query, pages):
        return reference(query, pages, rows, scale, start, out)
    rotated, latents = (part.flatten(2) for part in pages)  # [pages, page_size, dim]
    is_decode = max(rows.query_lens) == 1
    rotary_query, latent_query = (part.contiguous() for part in query.split((ROTARY, RANK), dim=2))
    if is_decode:  # [rows, queries, heads, dim]
        rotary_query, latent_query = rotary_query.unsqueeze(1), latent_query.unsqueeze(1)
    attended, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(
        latent_query,
        latents,
        latents,
        query_rope=rotary_query,
        key_rope=rotated,
        num_query_heads=query.shape[1],
        num_key_value_heads=1,
        softmax_scale=scale,
        block_size=latents.shape[1],
        **(_decode(rows) if is_decode else _ragged(rows, query)),
    )
    attended = attended.view(-1, *attended.shape[-2:])
    return attended if out is None else out.copy_(attended)


def _decode(rows: Rows) -> dict[str, Any]:
    """The arguments for rows of one query each."""
    return {
        "input_layout": "BSND",
        "block_table": rows.page_table.contiguous(),
        "actual_seq_kvlen": list(rows.contexts),
    }


def _ragged(rows: Rows, query: Tensor) -> dict[str, Any]:
    """The arguments for rows of different lengths, computed once for all layers."""
    key = "npu.latent"
    if key not in rows.plans:
        rows.plans[key] = _Pieces.of(rows)
    pieces: _Pieces = rows.plans[key]
    return {
        "input_layout": "TND",
        "block_table": pieces.page_table,
        "actual_seq_qlen": pieces.ends,
        "actual_seq_kvlen": pieces.contexts,
        **causal_mask(query, 0),
    }


class _Pieces(NamedTuple):
    """The rows in pieces of at most MAX_QUERIES queries. The kernel takes each piece as a row, whose context ends at
    the last query of the piece."""

    page_table: Tensor  # [pieces, pages]
    ends: list[int]  # number of queries up to the end of each piece
    contexts: list[int]

    @classmethod
    def of(cls, rows: Rows) -> _Pieces:
        assert rows.exact, "captured steps have rows of one query"
        indices: list[int] = []
        ends = [0]
        contexts: list[int] = []
        for row, (queries, context) in enumerate(zip(rows.query_lens, rows.contexts, strict=True)):
            for first in range(0, queries, MAX_QUERIES):
                count = min(MAX_QUERIES, queries - first)
                indices.append(row)
                ends.append(ends[-1] + count)
                contexts.append(context - queries + first + count)
        table = rows.page_table[torch.tensor(indices, device=rows.page_table.device)]
        return cls(table, ends[1:], contexts)
