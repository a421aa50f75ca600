"""Attention over a paged cache: one op for any mixture of decode rows and prefill rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LATENT_SCORES = 2**24  # scores of latent attention that the reference computes at a time, of whole heads


class RowRun(NamedTuple):
    """Neighbouring rows with equal numbers of queries."""

    rows: slice  # indices of the rows in the step
    tokens: slice  # the tokens of the rows in the step
    queries: int  # number of queries of each row


@dataclass(frozen=True)
class RowGroup:
    """Neighbouring rows with equal numbers of queries, and the cache slots that they read: the last `length` positions
    of each row, in ascending order. A row with a shorter context is padded with its first position, which is masked."""

    rows: int  # number of rows
    tokens: slice  # the tokens of the rows in the step
    slots: Tensor  # [rows * length], the cache slots of those positions
    allowed: Tensor | None  # [rows, 1, queries, length] bool; None: nothing is masked


@dataclass(frozen=True)
class Rows:
    """The tokens and pages of each row of a step. The queries of a row are the last tokens of its context.

    In the table of a layer with a window, the entries of pages that the window has passed may be 0. Page 0 has finite
    values, which the window masks.

    The tensors are on the device. The tuples are the same values on the host, for implementations that choose their
    launch by them. A captured step is replayed with other values, so its `contexts` are only upper bounds.
    """

    row_starts: Tensor  # [rows + 1] int32
    context_lens: Tensor  # [rows] int32, including the tokens of this step
    page_table: Tensor  # [rows, pages] int32
    query_lens: tuple[int, ...]
    contexts: tuple[int, ...]
    exact: bool = True  # `contexts` equals `context_lens`; False: `contexts` are upper bounds
    group: int = 0  # index of the cache group that `page_table` belongs to

    @cached_property
    def plans(self) -> dict[Any, Any]:
        """Results that implementations derive from these rows once for all layers, each under its own key. If `exact`
        is false, derive them from the tuples only, because each replay has other values in the tensors."""
        return {}

    def groups(self, page_size: int, window: int) -> list[RowGroup]:
        """The groups of rows for the reference, computed once for all layers with the same window.

        In a captured step every layer computes them again, because cached groups would not change between replays.
        """
        if not self.exact:
            return list(self._groups(page_size, window))
        key = page_size, window
        groups: list[RowGroup] | None = self.plans.get(key)
        if groups is None:
            groups = self.plans[key] = list(self._groups(page_size, window))
        return groups

    def _groups(self, page_size: int, window: int) -> Iterator[RowGroup]:
        return (self._group(*run, page_size, window) for run in self.runs())

    def runs(self) -> Iterator[RowRun]:
        """The runs of these rows, in order."""
        row = 0
        token = 0
        for queries, members in groupby(self.query_lens):
            count = len(tuple(members))
            run = RowRun(slice(row, row + count), slice(token, token + count * queries), queries)
            row = run.rows.stop
            token = run.tokens.stop
            yield run

    def _group(self, rows: slice, tokens: slice, queries: int, page_size: int, window: int) -> RowGroup:
        device = self.page_table.device
        count = rows.stop - rows.start
        longest = max(self.contexts[rows])
        length = min(longest, window + queries - 1) if window else longest
        index = torch.arange(length, device=device)
        position = self.context_lens[rows, None] - length + index  # [rows, length]
        readable = position.clamp(min=0).long()
        slots = self.page_table[rows].gather(1, readable // page_size) * page_size + readable % page_size
        if count == queries == 1 and self.exact:  # no mask, because the only query sees all these positions
            return RowGroup(count, tokens, slots.flatten(), None)
        query = torch.arange(length - queries, length, device=device).unsqueeze(1)
        visible = index <= query  # [queries, length]
        if window:
            visible &= index > query - window
        allowed = (visible & (position >= 0).unsqueeze(1)).unsqueeze(1)
        return RowGroup(count, tokens, slots.flatten(), allowed)


class Attend(NamedTuple):
    """The arguments of attention that belong to a layer. They are the same in every step.

    With a window, each query sees the last `window` positions up to its own (0: all positions). With a soft cap, the
    scaled scores become cap * tanh(score / cap). Sinks are scores that are added to the denominator of each softmax
    only (Xiao et al., 2023; learned, as in gpt-oss).
    """

    key_pages: Tensor  # [pages, page_size, kv heads, dim]
    value_pages: Tensor
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None  # [heads] float32
    scales: Tensor | None = None  # [2, pages, kv heads, page_size] float32: of int8 pages, keys first

    @property
    def page_size(self) -> int:
        return self.key_pages.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.key_pages.shape[2]


def paged_attention(query: Tensor, rows: Rows, attend: Attend, out: Tensor | None = None) -> Tensor:
    """Causal attention of every query over the context of its row -> [tokens, heads, dim].

    query [tokens, heads, dim], heads a multiple of kv heads (grouped queries: Ainslie et al., 2023). Slots beyond the
    context of a row do not affect the output, even if they contain NaN. If `out` (dense) is not None, it receives the
    output.
    """
    out = query.new_empty(query.shape) if out is None else out
    query = _aligned(query)
    for group in rows.groups(attend.page_size, attend.window):
        # queries [rows, heads, queries, dim], keys and values [rows, kv heads, length, dim]
        queries = query[group.tokens].view(group.rows, -1, *query.shape[1:]).transpose(1, 2)
        keys, values = (
            part.view(group.rows, -1, *part.shape[1:]).transpose(1, 2)
            for part in _read(group.slots, attend, query.dtype)
        )
        attended = _attend(queries, keys, values, group.allowed, attend)
        out[group.tokens] = attended.transpose(1, 2).flatten(0, 1)
    return out


def _read(slots: Tensor, attend: Attend, dtype: torch.dtype) -> list[Tensor]:
    """The keys and the values in `slots`, each [slots, kv heads, dim]. Those of int8 pages become `dtype`."""
    parts = [pages.flatten(0, 1).index_select(0, slots) for pages in (attend.key_pages, attend.value_pages)]
    if attend.scales is None:
        return parts
    scales = attend.scales.transpose(2, 3).flatten(1, 2).index_select(1, slots).unsqueeze(3)
    return [(part * scale).to(dtype) for part, scale in zip(parts, scales, strict=True)]


def latent_attention(
    query: Tensor, pages: tuple[Tensor, ...], rows: Rows, scale: float, start: int, out: Tensor | None = None
) -> Tensor:
    """Causal attention over a latent cache (MLA: DeepSeek-V2, 2024) -> [tokens, heads, dim - start].

    query [tokens, heads, dim], absorbed: in the space of the latents; pages: the keys of all heads, one tensor [pages,
    page_size, 1, dim], or one with the columns before `start` and one with the others. The values are the columns of
    the keys from `start` on. Slots beyond the context of a row do not affect the output, even if they contain NaN. If
    `out` (dense) is not None, it receives the output.
    """
    tokens, heads, dim = query.shape
    out = query.new_empty(tokens, heads, dim - start) if out is None else out
    wide = torch.promote_types(query.dtype, torch.float32)
    for group in rows.groups(pages[0].shape[1], 0):
        # queries [rows, heads, queries, dim], keys [rows, length, dim]
        queries = query[group.tokens].unflatten(0, (group.rows, -1)).transpose(1, 2).to(wide)
        parts = [part.flatten(0, 2).index_select(0, group.slots) for part in pages]
        keys = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).view(group.rows, -1, dim).to(wide)
        if group.allowed is not None:
            is_stored = group.allowed.any(2).transpose(1, 2)  # NaN * 0 is NaN, so other values become zeros
            keys = keys.masked_fill(~is_stored, 0.0)
        head_scores = group.rows * queries.shape[2] * keys.shape[1]
        results = [
            _attend_latents(some, keys, group.allowed, scale, start)
            for some in queries.split(max(1, LATENT_SCORES // max(1, head_scores)), dim=1)
        ]
        out[group.tokens] = torch.cat(results, dim=1).transpose(1, 2).flatten(0, 1).to(query.dtype)
    return out


def _attend_latents(query: Tensor, keys: Tensor, allowed: Tensor | None, scale: float, start: int) -> Tensor:
    """query [rows, heads, queries, dim], keys [rows, length, dim] -> [rows, heads, queries, dim - start].

    The heads share their keys, so they are queries of one head: [rows, heads * queries, dim].
    """
    shape = query.shape[1:3]
    scores = (query.flatten(1, 2) @ keys.transpose(1, 2) * scale).unflatten(1, shape)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    weights = scores.softmax(-1).flatten(1, 2)
    attended: Tensor = (weights @ keys[..., start:]).unflatten(1, shape)
    return attended


def _aligned(query: Tensor) -> Tensor:
    """The query, or a copy that is contiguous and aligned to 16 bytes: torch's fused attention on a GPU reads a query
    without that alignment from a wrong address."""
    aligned = query.is_contiguous() and query.data_ptr() % 16 == 0
    return query if aligned else query.clone(memory_format=torch.contiguous_format)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    attend: Attend,
) -> Tensor:
    """query, key and value [rows, heads, …, dim]. torch's fused attention supports neither soft caps nor sinks: with
    these the scores are computed explicitly."""
    scale, soft_cap, sinks = attend.scale, attend.soft_cap, attend.sinks
    if not soft_cap and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scale, enable_gqa=True)
    repeats = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(repeats, 1)
    value = value.repeat_interleave(repeats, 1)
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * scale
    if soft_cap:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is None:
        return (scores.softmax(-1) @ value.to(wide)).to(query.dtype)
    sink = sinks.to(wide).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    return (weights @ value.to(wide)).to(query.dtype)


@dataclass(frozen=True, slots=True)
class Attention:
    """The implementations of attention on a device."""

    paged: Callable[..., Tensor] = paged_attention
    latent: Callable[..., Tensor] = latent_attention
