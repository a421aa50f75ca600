"""Attention: npu_fused_infer_attention_score, its second version, and the paged attention of the library ATB."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .rules import HALF, IS_TINY, Call, Changes, Op, contiguous, doubtful_rule, dtype_of, rule, size_rule, unsupported

MASK = 2048
COMPUTED = (*HALF, torch.float32) if IS_TINY else HALF


@dataclass
class Score:
    """A call of either version, with one set of names."""

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    query_rope: Tensor | None
    key_rope: Tensor | None
    mask: Tensor | None
    query_lens: list[int] | None
    kv_lens: list[int] | None
    table: Tensor | None
    sink: Tensor | None
    key_scale: Tensor | None  # of int8 keys
    value_scale: Tensor | None
    scale_mode: int  # 0: per channel, 1: per token, 5: per token and head, in pages
    heads: int
    kv_heads: int
    scale: float
    before: int
    after: int
    layout: str
    sparse_mode: int
    block_size: int
    wants_lse: bool
    latent_heads: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    value_mode: int = 0
    ragged: bool = field(init=False)
    queries: int = field(init=False)  # of each row; 0: rows differ

    def __post_init__(self) -> None:
        self.kv_heads = self.kv_heads or self.heads
        self.ragged = self.layout == "TND"
        self.queries = 0 if self.ragged else self.query.shape[2 if self.layout.startswith("BNSD") else 1]

    def rows(self) -> int:
        return len(self.query_lens or []) if self.ragged else self.query.shape[0]

    def dim(self) -> int:
        return self.query.shape[-1] // self.heads if self.layout == "BSH" else self.query.shape[-1]

    def capacity(self) -> int:
        """Positions of a row of keys."""
        if self.table is not None:
            return self.table.shape[1] * self.block_size
        return self.key.shape[2 if self.layout.startswith("BNSD") else 1] if not self.ragged else self.key.shape[0]


def _is_list(lens: object) -> bool:
    return lens is None or (isinstance(lens, list | tuple) and all(isinstance(n, int) for n in lens))


def _check_tensors(s: Score) -> None:
    name = s.name
    tensors = (s.query, s.key, s.value, s.mask, s.query_rope, s.key_rope)
    rule(
        s.layout in ("BSH", "BSND", "BNSD", "BNSD_BSND", "TND"),
        f"{name}: input_layout is BSH, BSND, BNSD, BNSD_BSND or TND",
    )
    dims = 3 if s.layout in ("BSH", "TND") else 4
    rule(s.query.dim() == dims, f"{name}: the query has the dimensions of its layout")
    rule(contiguous(*tensors), f"{name}: tensors are contiguous")
    rule(dtype_of(s.query, *COMPUTED), f"{name}: the query is float16 or bfloat16")
    rule(dtype_of(s.key, s.query.dtype, torch.int8), f"{name}: keys have the dtype of the query, or int8")
    rule(s.key.dtype == s.value.dtype and s.key.shape[:-1] == s.value.shape[:-1], f"{name}: keys and values match")
    rule((s.key.dtype == torch.int8) == (s.key_scale is not None), f"{name}: int8 keys, and no others, have scales")
    rule((s.query_rope is None) == (s.key_rope is None), f"{name}: query_rope and key_rope are both set, or neither")
    rule(s.heads % s.kv_heads == 0, f"{name}: kv heads divide the query heads")
    is_few = s.heads // s.kv_heads <= 64 or s.query_rope is not None
    rule(is_few, f"{name}: at most 64 query heads for each kv head")
    rule(s.heads <= 256 and s.dim() <= 512, f"{name}: at most 256 heads of at most 512 dimensions")
    unit = 32 if s.key.dtype == torch.int8 else 16
    rule(s.dim() % unit == 0, f"{name}: the dimension is a multiple of 16, or of 32 for int8")
    is_narrow = s.layout not in ("BSH", "BSND") or s.queries == 1 or s.heads * s.dim() < 65535
    rule(is_narrow, f"{name}: heads * dimension is less than 65535")
    if s.layout == "TND":
        is_real = s.query_rope is not None or (s.query.dtype == torch.bfloat16 and s.dim() in (128, 192))
        size_rule(is_real, f"{name}: TND has bfloat16 and a dimension of 128 or 192")


def _check_scales(s: Score) -> None:
    """The rules of int8 keys and values."""
    name, key, value = s.name, s.key_scale, s.value_scale
    rule((key is None) == (value is None), f"{name}: keys and values both have scales, or neither")
    if key is None or value is None:
        return
    modes = s.scale_mode, s.value_mode
    rule(modes[0] == modes[1] or modes == (0, 1), f"{name}: the modes of keys and values are equal, or 0 and 1")
    rule(all(0 <= mode <= 5 for mode in modes), f"{name}: the modes of scales are 0 to 5")
    if s.queries != 1:
        rule(s.table is None, f"{name}: pages of int8 need one query in each row")
        rule(s.scale_mode < 2, f"{name}: the modes of scales for many queries are 0 and 1")
        is_short = s.query.dtype == torch.bfloat16 and s.queries <= 16
        rule(is_short, f"{name}: int8 keys have at most 16 queries, bfloat16")
    if s.scale_mode == 5:
        shape = (len(s.key), s.kv_heads, s.block_size)
        rule(key.shape == value.shape == shape, f"{name}: scales of mode 5 are [blocks, kv heads, block]")
    wanted = s.query.dtype if s.scale_mode in (0, 2) else torch.float32
    rule(dtype_of(key, wanted), f"{name}: scales are float32, those of modes 0 and 2 have the dtype of the query")
    rule(contiguous(key, value), f"{name}: scales are contiguous")


def _check_lengths(s: Score) -> None:
    name = s.name
    rule(_is_list(s.query_lens) and _is_list(s.kv_lens), f"{name}: lengths are lists of integers of the host")
    rule(min([0, *(s.query_lens or []), *(s.kv_lens or [])]) >= 0, f"{name}: lengths are not negative")
    if s.ragged:
        _check_ragged_lengths(s)
    is_complete = s.kv_lens is None or len(s.kv_lens) >= s.rows() or (len(s.kv_lens) == 1 and not s.ragged)
    rule(is_complete, f"{name}: there is one kv length, or one for each row")
    fits = s.ragged or s.table is not None or s.kv_lens is None or max(s.kv_lens) <= s.capacity()
    rule(fits, f"{name}: a kv length is at most the positions of a row")


def _check_ragged_lengths(s: Score) -> None:
    name = s.name
    lens, kv = s.query_lens or [], s.kv_lens or []
    rule(s.query_lens is not None and s.kv_lens is not None, f"{name}: TND needs both lists of lengths")
    rule(sorted(lens) == list(lens), f"{name}: the query lengths of TND are cumulative")
    rule(list(lens)[-1:] == [s.query.shape[0]], f"{name}: the query lengths of TND end at the last token")
    is_cumulative = s.table is not None or (sorted(kv) == list(kv) and kv[-1] == s.key.shape[0])
    rule(is_cumulative, f"{name}: the kv lengths of TND without pages are cumulative")


def _check_block_size(s: Score) -> None:
    name = s.name
    if s.query_rope is not None:
        rule(s.block_size in (16, 128), f"{name}: block_size of latent attention is 16 or 128")
    elif s.queries == 1:
        unit = 32 if s.key.dtype == torch.int8 else 16
        is_block = 0 < s.block_size <= 512 and s.block_size % unit == 0
        rule(is_block, f"{name}: for one query, block_size is a multiple of 16 (32 for int8), at most 512")
    else:
        is_block = s.block_size % 128 == 0 and 128 <= s.block_size <= 512
        rule(is_block, f"{name}: block_size is a multiple of 128, at most 512")


def _check_pages(s: Score) -> None:
    name, table = s.name, s.table
    if table is None:
        return
    rule(table.dim() == 2 and table.shape[0] == s.rows(), f"{name}: block_table has a row for each row of the batch")
    rule(dtype_of(table, torch.int32), f"{name}: block_table is int32")
    rule(contiguous(table), f"{name}: block_table is contiguous")
    rule(s.kv_lens is not None, f"{name}: pages need kv lengths")
    _check_block_size(s)
    is_flat = s.key.dim() == 3
    allowed = (3, 4) if s.layout in ("BNSD", "BNSD_BSND", "TND") else (3,)
    rule(
        s.key.dim() in allowed,
        f"{name}: pages are [blocks, block, H]; BNSD and TND also have [blocks, heads, block, D]",
    )
    rule(s.key.shape[-2] == s.block_size, f"{name}: pages have block_size positions")
    rule(not is_flat or s.key.shape[2] % s.kv_heads == 0, f"{name}: H of the pages has all kv heads")
    rule(not is_flat or s.key.shape[2] <= 65535, f"{name}: H of the pages is at most 65535")
    rule(s.key.numel() < 2**31, f"{name}: a cache of one layer has less than 2**31 elements")
    needed = max(-(-n // s.block_size) for n in s.kv_lens or [0])
    rule(table.shape[1] >= needed, f"{name}: block_table has the blocks of the longest row")
    doubtful_rule(not s.ragged or s.query_rope is not None, f"{name}: TND excludes pages")


def _check_mask(s: Score) -> None:
    name, mask = s.name, s.mask
    rule(dtype_of(mask, torch.bool, torch.int8, torch.uint8), f"{name}: the mask is bool, int8 or uint8")
    rule(0 <= s.sparse_mode <= 4, f"{name}: sparse_mode is 0 to 4")
    if s.queries == 1 and s.query_rope is None:
        is_row = mask is None or mask.shape == (MASK, MASK) or mask.numel() >= s.capacity()
        rule(is_row, f"{name}: the mask of one query has a value for each position of the pages")
    else:
        _check_mask_of_queries(s)


def _check_mask_of_queries(s: Score) -> None:
    name, mask = s.name, s.mask
    if s.sparse_mode >= 2:
        is_triangle = mask is not None and mask.shape[-2:] == (MASK, MASK) and mask.numel() == MASK * MASK
        rule(is_triangle, f"{name}: sparse modes 2, 3 and 4 need the mask of 2048 x 2048")
    if s.sparse_mode == 1:
        rule(mask is not None, f"{name}: sparse mode 1 needs a complete mask")
    if mask is not None and s.sparse_mode < 2:
        is_full = mask.shape[-1] >= s.capacity() and mask.shape[-2] >= s.queries
        rule(is_full, f"{name}: a complete mask has all queries and all positions")
    rule(not s.ragged or s.sparse_mode in (0, 3, 4), f"{name}: TND has sparse modes 0, 3 and 4")
    rule(not s.ragged or (mask is None) == (s.sparse_mode == 0), f"{name}: TND has a mask in sparse modes 3 and 4 only")


def _check_sink(s: Score) -> None:
    if s.sink is None:
        return
    rule(s.ragged, f"{s.name}: learnable_sink needs TND")
    rule(s.sink.shape == (s.heads,), f"{s.name}: learnable_sink has a value for each query head")
    rule(dtype_of(s.sink, torch.bfloat16), f"{s.name}: learnable_sink is bfloat16")
    rule(
        s.value.shape[-1] // (s.kv_heads if s.value.dim() == 3 and s.table is not None else 1) <= 128,
        f"{s.name}: learnable_sink has values of at most 128 dimensions",
    )


def _check_latent(s: Score) -> None:
    """The rules of absorbed latent attention: 512 dimensions, and 64 that are rotated."""
    name = s.name
    if s.query_rope is None or s.key_rope is None:
        return
    rule(
        s.query_rope.dtype == s.query.dtype and s.key_rope.dtype == s.key.dtype,
        f"{name}: ropes have the dtypes of query and key",
    )
    shapes = s.query_rope.shape[:2] == s.query.shape[:2] and s.key_rope.shape[:2] == s.key.shape[:2]
    rule(shapes, f"{name}: ropes have the rows and heads of query and key")
    rule(s.table is not None, f"{name}: latent attention needs pages")
    rule(s.kv_heads == 1, f"{name}: latent attention has one kv head")
    heads = s.heads if s.layout == "BSH" else 1
    size_rule(
        s.dim() == 512 and s.query_rope.shape[-1] // heads == 64, f"{name}: latents have 512, ropes 64 dimensions"
    )
    size_rule(s.heads in s.latent_heads, f"{name}: the heads of latent attention are powers of 2, at most 128")
    lens = s.query_lens or []
    most = (
        max((end - start for start, end in zip([0, *lens], lens, strict=False)), default=0) if s.ragged else s.queries
    )
    rule(most <= 16, f"{name}: rows of latent attention have at most 16 queries")
    mode = (0, True) if most == 1 else (3, False)
    rule(
        (s.sparse_mode, s.mask is None) == mode, f"{name}: latent attention has no mask for 1 query, else sparse mode 3"
    )


def check(s: Score) -> None:
    for part in (_check_tensors, _check_scales, _check_lengths, _check_pages, _check_latent, _check_mask, _check_sink):
        part(s)


# The reference


def _split(x: Tensor, layout: str, heads: int, lens: list[int] | None) -> list[Tensor]:
    """Rows [tokens, heads, dim] of a tensor in a layout."""
    if layout == "TND":
        ends = list(lens or [])
        return [x[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    if layout == "BSH":
        x = x.unflatten(2, (heads, -1))
    elif layout.startswith("BNSD"):
        x = x.transpose(1, 2)
    rows = list(x)
    if lens is None:
        return rows
    every = list(lens) * len(rows) if len(lens) == 1 else lens
    return [row[:length] for row, length in zip(rows, every, strict=False)]


def _paged(pages: Tensor, s: Score) -> list[Tensor]:
    """Rows [positions, kv heads, dim] of the keys or values in pages."""
    assert s.table is not None
    pages = pages.unflatten(2, (s.kv_heads, -1)) if pages.dim() == 3 else pages.transpose(1, 2)
    lens = list(s.kv_lens or [])
    lens = lens * s.rows() if len(lens) == 1 else lens
    rows = []
    for blocks, length in zip(s.table.long(), lens, strict=False):
        used = blocks[: -(-length // s.block_size)]
        if len(used) and not 0 <= int(used.min()) <= int(used.max()) < len(pages):
            raise IndexError(f"{s.name}: block_table has block {int(used.max())} of {len(pages)}")
        rows.append(pages[used].flatten(0, 1)[:length])
    return rows


def _keys(x: Tensor, scale: Tensor | None, s: Score) -> list[Tensor]:
    rows = _paged(x, s) if s.table is not None else _split(x, s.layout, s.kv_heads, s.kv_lens)
    if scale is None:
        return [row.float() for row in rows]
    if s.scale_mode == 5:
        factors = _paged(scale.transpose(1, 2), s)  # [positions, kv heads, 1]
        return [row.float() * factor.float() for row, factor in zip(rows, factors, strict=True)]
    if s.scale_mode == 0:  # one scale for each channel, or one for all
        channels = scale.float().reshape(-1)
        factor = channels if channels.numel() == 1 else channels.view(s.kv_heads, -1)
        return [row.float() * factor for row in rows]
    return [row.float() * by_token[: len(row), None, None].float() for row, by_token in zip(rows, scale, strict=False)]


def _allowed(s: Score, row: int, queries: int, length: int) -> Tensor | None:
    """[heads or 1, queries, positions]: the positions that each query sees."""
    is_single = s.queries == 1 and s.query_rope is None
    if is_single and (s.mask is None or s.mask.shape == (MASK, MASK)):
        return None  # one query ignores sparse_mode
    if is_single or s.sparse_mode < 2:
        return None if s.mask is None else _unmasked(s, s.mask, row, queries, length)
    assert s.mask is not None
    if not _is_triangle(s.mask.reshape(MASK, MASK)):
        raise ValueError(f"{s.name}: the mask of sparse modes 2, 3 and 4 is a triangle: True above the diagonal")
    shift = 0 if s.sparse_mode == 2 else length - queries
    before, after = (s.before, s.after) if s.sparse_mode == 4 else (length + queries, 0)
    return _band(queries, length, before, after, shift)[None]


def _is_triangle(mask: Tensor) -> bool:
    """Whether some rows of a mask [MASK, MASK] are True above the diagonal only."""
    return all(
        mask[row].int().sum() == MASK - 1 - row and not mask[row, : row + 1].any() for row in (0, 1000, MASK - 1)
    )


def _unmasked(s: Score, mask: Tensor, row: int, queries: int, length: int) -> Tensor:
    """[1, queries, positions]: where the complete mask of a row is false."""
    is_row_mask = s.queries == 1 and mask.dim() == 2
    masks = mask[:, None] if is_row_mask else mask.reshape(-1, *mask.shape[-2:])
    seen = ~masks[row % len(masks), :queries, :length].bool()
    return (seen & _band(queries, length, s.before, s.after, 0))[None] if s.sparse_mode == 0 else seen[None]


def _band(queries: int, length: int, before: int, after: int, shift: int) -> Tensor:
    distance = torch.arange(length) - torch.arange(queries)[:, None] - shift
    return (distance <= after) & (distance >= -before)


def _attend(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, s: Score) -> tuple[Tensor, Tensor]:
    """[tokens, heads, dim] of one row, and the logarithms of the denominators [tokens, heads, 1]."""
    group = s.heads // s.kv_heads
    key, value = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (key, value))
    scores = query.float().transpose(0, 1) @ key.transpose(1, 2) * s.scale  # [heads, queries, positions]
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    if s.sink is not None:
        scores = torch.cat((scores, s.sink.float().view(-1, 1, 1).expand(-1, len(query), 1)), -1)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp().nan_to_num()[..., : key.shape[1]]
    return (weights @ value).transpose(0, 1), lse.transpose(0, 1)


def compute(s: Score) -> tuple[Tensor, Tensor]:
    lens = s.query_lens if s.ragged or s.queries > 1 else None
    queries = _split(s.query, s.layout, s.heads, lens)
    keys, values = _keys(s.key, s.key_scale, s), _keys(s.value, s.value_scale, s)
    if s.query_rope is not None:
        ropes = _split(s.query_rope, s.layout, s.heads, lens)
        queries = [torch.cat(pair, -1) for pair in zip(queries, ropes, strict=True)]
        assert s.key_rope is not None
        keys = [torch.cat(pair, -1) for pair in zip(keys, _keys(s.key_rope, None, s), strict=True)]
    tokens = [
        _attend(query, key, value, _allowed(s, row, len(query), len(key)), s)
        for row, (query, key, value) in enumerate(zip(queries, keys, values, strict=False))
    ]
    if s.ragged:
        out, sums = torch.cat([part for part, _ in tokens]), torch.cat([part for _, part in tokens])
    else:
        out, sums = _padded(s, tokens)
    return out.to(s.query.dtype), sums if s.wants_lse else torch.empty(0)


def _padded(s: Score, tokens: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The results of all rows in the layout. Rows shorter than the tensor end with zeros."""
    whole = torch.zeros(len(tokens), s.queries, s.heads, tokens[0][0].shape[-1])
    sums = torch.full((len(tokens), s.heads, s.queries, 1), math.inf)
    for row, (part, denominators) in enumerate(tokens):
        whole[row, : len(part)] = part
        sums[row, :, : len(part)] = denominators.transpose(0, 1)
    whole = whole.flatten(2) if s.layout == "BSH" else whole.transpose(1, 2) if s.layout == "BNSD" else whole
    return whole, sums


def _example() -> Changes:
    return {
        "query": torch.randn(3, 2, 4, 128).bfloat16(),
        "key": torch.randn(5, 128, 256).bfloat16(),
        "value": torch.randn(5, 128, 256).bfloat16(),
        "num_key_value_heads": 2,
        "input_layout": "BSND",
        "sparse_mode": 3,
        "atten_mask": torch.ones(MASK, MASK, dtype=torch.bool).triu(1),
        "block_table": torch.tensor([[1, 2], [3, 0], [4, 0]], dtype=torch.int32),
        "block_size": 128,
    }


class _Fused(Op):
    """What both versions share. `query_lens`, … are the names of their arguments."""

    query_lens: str
    kv_lens: str
    heads: str
    lse: str
    key_scales: tuple[str, str]
    modes: tuple[str, str]  # of the scales

    def example(self) -> Changes:
        return {**_example(), self.kv_lens: [200, 100, 2], self.heads: 4}

    def score(self, c: Call) -> Score:
        raise NotImplementedError

    def check(self, c: Call) -> None:
        check(self.score(c))

    def compute(self, c: Call) -> Any:
        return compute(self.score(c))

    def ragged(self, c: Call) -> Changes:
        """The example in TND."""
        return {"input_layout": "TND", "query": c.query.flatten(0, 1), self.query_lens: [1, 4, 6]}

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        ragged, table = self.ragged(c), c.block_table
        lone = {"query": c.query[:, :1].contiguous(), "sparse_mode": 0, "atten_mask": None}
        plain = {
            "key": torch.randn(3, 256, 2, 128).bfloat16(),
            "value": torch.randn(3, 256, 2, 128).bfloat16(),
            "block_table": None,
            "block_size": 0,
        }
        yield "input_layout is", {"input_layout": "SBH"}
        yield "dimensions of its layout", {"query": c.query.flatten(2)}
        yield "tensors are contiguous", {"query": c.query.transpose(1, 2)}
        yield "query is float16", {"query": c.query.double(), "key": c.key.double(), "value": c.value.double()}
        yield "keys have the dtype", {"key": c.key.half()}
        yield "keys and values match", {"value": c.value[:4]}
        yield "no others, have scales", {self.key_scales[0]: torch.ones(256), self.key_scales[1]: torch.ones(256)}
        yield "both set, or neither", {"query_rope": c.query}
        yield "divide the query heads", {"num_key_value_heads": 3}
        yield "64 query heads", {self.heads: 130, "query": torch.zeros(3, 2, 130, 128).bfloat16()}
        yield "256 heads", {"query": torch.zeros(3, 2, 4, 528).bfloat16()}
        yield "multiple of 16, or", {"query": c.query[..., :120].contiguous()}
        yield "less than 65535", {self.heads: 128, "query": torch.zeros(3, 2, 128, 512).bfloat16()}
        yield "TND has bfloat16", {**ragged, "query": torch.zeros(6, 4, 64).bfloat16()}
        yield "integers of the host", {self.kv_lens: [200.0, 100.0, 2.0]}
        yield "not negative", {self.kv_lens: [200, -1, 2]}
        yield "both lists", {**ragged, self.query_lens: None}
        yield "TND are cumulative", {**ragged, self.query_lens: [1, 3, 2]}
        yield "end at the last token", {**ragged, self.query_lens: [1, 3, 5]}
        keys = torch.randn(600, 2, 128).bfloat16()
        packed = {**ragged, **plain, "key": keys, "value": keys}
        yield "without pages are cumulative", {**packed, self.kv_lens: [200, 100, 300]}
        yield "one for each row", {self.kv_lens: [200, 100]}
        yield "positions of a row", {**plain, self.kv_lens: [257, 1, 1]}
        yield "row for each row of the batch", {"block_table": table[:2]}
        yield "block_table is int32", {"block_table": table.long()}
        yield "block_table is contiguous", {"block_table": table.T.contiguous().T}
        yield "pages need kv lengths", {self.kv_lens: None}
        pages = {name: torch.zeros(5, 72, 256).bfloat16() for name in ("key", "value")}
        yield "for one query, block_size", {**lone, **pages, "block_size": 72, self.kv_lens: [1, 1, 1]}
        yield from self._wrong_latents(c)
        pages = {name: torch.zeros(5, 64, 256).bfloat16() for name in ("key", "value")}
        yield "block_size is a multiple of 128", {**pages, "block_size": 64, self.kv_lens: [1, 1, 1]}
        pages = {name: torch.zeros(5, 2, 128, 128).bfloat16() for name in ("key", "value")}
        yield "pages are [blocks", pages
        yield "block_size positions", {"block_size": 256}
        pages = {name: torch.zeros(5, 128, 255).bfloat16() for name in ("key", "value")}
        yield "all kv heads", pages
        pages = {name: torch.zeros(1, 128, 65536).bfloat16() for name in ("key", "value")}
        yield "at most 65535", pages
        huge = torch.empty(2**17, 128, 256, dtype=torch.bfloat16, device="meta")
        yield "2**31 elements", {"key": huge, "value": huge}
        yield "blocks of the longest row", {"block_table": table[:, :1].contiguous()}
        yield "bool, int8 or uint8", {"atten_mask": c.atten_mask.float()}
        yield "sparse_mode is 0 to 4", {"sparse_mode": 5}
        yield "mask of one query", {**lone, "atten_mask": torch.zeros(3, 1, 1, 4, dtype=torch.bool)}
        yield "2048 x 2048", {"atten_mask": None}
        yield "needs a complete mask", {"sparse_mode": 1, "atten_mask": None}
        yield (
            "all queries and all positions",
            {"sparse_mode": 1, "atten_mask": torch.zeros(1, 2, 255, dtype=torch.bool)},
        )
        yield from self._wrong_scales(c, lone)
        yield "modes 0, 3 and 4", {**ragged, "sparse_mode": 2}
        yield "modes 3 and 4 only", {**ragged, "sparse_mode": 0, "atten_mask": torch.zeros(1, 6, 256, dtype=torch.bool)}

    def _wrong_scales(self, c: Call, lone: Changes) -> Iterator[tuple[str, Changes]]:
        key_scale, value_scale = self.key_scales
        key_mode, value_mode = self.modes
        pages = torch.ones(5, 128, 256, dtype=torch.int8)
        scale = torch.ones(5, 2, 128)
        many = {"key": pages, "value": pages, key_scale: scale, value_scale: scale, key_mode: 5, value_mode: 5}
        one = {**lone, **many}
        check(self.score(Call(**{**vars(c), **one})))
        yield "both have scales", {**one, value_scale: None}
        yield "are equal, or 0 and 1", {**one, value_mode: 1}
        yield "are 0 to 5", {**one, key_mode: 6, value_mode: 6}
        yield "need one query in each row", many
        rows = torch.ones(3, 256, 2, 128, dtype=torch.int8)
        apart = {**many, "key": rows, "value": rows, "block_table": None, "block_size": 0}
        yield "for many queries are 0 and 1", apart
        long = {key_mode: 1, value_mode: 1, "query": torch.zeros(3, 17, 4, 128).bfloat16()}
        yield "at most 16 queries", {**apart, **long}
        yield "[blocks, kv heads, block]", {**one, key_scale: scale[:4]}
        yield "have the dtype of the query", {**one, key_scale: scale.bfloat16()}
        turned = scale.transpose(0, 1).contiguous().transpose(0, 1)
        yield "scales are contiguous", {**one, key_scale: turned, value_scale: turned}

    def _wrong_latents(self, c: Call) -> Iterator[tuple[str, Changes]]:
        latent = {
            "query": torch.zeros(3, 2, 32, 512).bfloat16(),
            "query_rope": torch.zeros(3, 2, 32, 64).bfloat16(),
            "key": torch.zeros(5, 128, 512).bfloat16(),
            "value": torch.zeros(5, 128, 512).bfloat16(),
            "key_rope": torch.zeros(5, 128, 64).bfloat16(),
            "num_key_value_heads": 1,
            self.heads: 32,
        }
        check(self.score(Call(**{**vars(c), **latent})))
        yield "latent attention is 16 or 128", {**latent, "block_size": 64, self.kv_lens: [1, 1, 1]}
        yield "dtypes of query and key", {**latent, "query_rope": latent["query_rope"].half()}
        yield "rows and heads of query", {**latent, "key_rope": torch.zeros(4, 128, 64).bfloat16()}
        packed = {"key": torch.zeros(3, 256, 1, 512).bfloat16(), "key_rope": torch.zeros(3, 256, 1, 64).bfloat16()}
        yield "needs pages", {**latent, **packed, "value": packed["key"], "block_table": None}
        yield "one kv head", {**latent, "num_key_value_heads": 2}
        yield "latents have 512", {**latent, "query_rope": torch.zeros(3, 2, 32, 32).bfloat16()}
        odd = {name: torch.zeros(3, 2, 24, dim).bfloat16() for name, dim in (("query", 512), ("query_rope", 64))}
        yield "powers of 2", {**latent, **odd, self.heads: 24}
        many = {name: torch.zeros(3, 17, 32, dim).bfloat16() for name, dim in (("query", 512), ("query_rope", 64))}
        yield "at most 16 queries", {**latent, **many}
        yield "else sparse mode 3", {**latent, "sparse_mode": 0, "atten_mask": None}


class FusedInferAttentionScore(_Fused):
    names = ("npu::npu_fused_infer_attention_score", "npu::npu_fused_infer_attention_score.out")
    query_lens, kv_lens, heads, lse = "actual_seq_lengths", "actual_seq_lengths_kv", "num_heads", "softmax_lse_flag"
    key_scales = ("key_antiquant_scale", "value_antiquant_scale")
    modes = ("key_antiquant_mode", "value_antiquant_mode")

    def score(self, c: Call) -> Score:
        unsupported(c.pse_shift, c.dequant_scale1, c.quant_scale1, c.dequant_scale2, c.quant_scale2, c.antiquant_scale)
        unsupported(c.query_padding_size, c.kv_padding_size, c.key_shared_prefix, c.key_antiquant_offset)
        return Score(
            "npu_fused_infer_attention_score",
            *(c.query, c.key, c.value, c.query_rope, c.key_rope, c.atten_mask),
            *(c.actual_seq_lengths, c.actual_seq_lengths_kv, c.block_table, None),
            *(c.key_antiquant_scale, c.value_antiquant_scale, c.key_antiquant_mode),
            *(c.num_heads, c.num_key_value_heads, c.scale, c.pre_tokens, c.next_tokens),
            *(c.input_layout, c.sparse_mode, c.block_size, c.softmax_lse_flag),
            latent_heads=(32, 64, 128),
            value_mode=c.value_antiquant_mode,
        )

    def check(self, c: Call) -> None:
        super().check(c)
        s = self.score(c)
        is_even = not s.ragged or (s.heads == s.kv_heads and s.heads in (8, 16, 32, 64, 128))
        size_rule(is_even, f"{s.name}: TND has as many kv heads as query heads: 8, 16, 32, 64 or 128")
        size_rule(not s.ragged or s.dim() == 192, f"{s.name}: TND has a dimension of 192")
        has_channels = s.key_scale is not None and s.queries != 1 and s.scale_mode == 0
        rule(not has_channels, f"{s.name}: many queries have scales for each token")

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield from super().wrong(c)
        ragged = self.ragged(c)
        yield "as many kv heads", ragged
        tensors = {
            "query": torch.zeros(6, 8, 128),
            "key": torch.zeros(5, 128, 1024),
            "value": torch.zeros(5, 128, 1024),
        }
        eight = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        rows, scale = torch.ones(3, 256, 2, 128, dtype=torch.int8), torch.ones(256).bfloat16()
        plain = {"key": rows, "value": rows, "block_table": None, "block_size": 0, self.kv_lens: [200, 100, 2]}
        yield "scales for each token", {**plain, self.key_scales[0]: scale, self.key_scales[1]: scale}
        yield "dimension of 192", {**ragged, **eight, self.heads: 8, "num_key_value_heads": 8}


class FusedInferAttentionScoreV2(_Fused):
    names = ("npu::npu_fused_infer_attention_score_v2", "npu::npu_fused_infer_attention_score_v2.out")
    query_lens, kv_lens, heads, lse = "actual_seq_qlen", "actual_seq_kvlen", "num_query_heads", "return_softmax_lse"
    key_scales = ("dequant_scale_key", "dequant_scale_value")
    modes = ("key_quant_mode", "value_quant_mode")

    def score(self, c: Call) -> Score:
        unsupported(c.pse_shift, c.dequant_scale_query, c.dequant_offset_key, c.quant_scale_out, c.quant_scale_p)
        return Score(
            "npu_fused_infer_attention_score_v2",
            *(c.query, c.key, c.value, c.query_rope, c.key_rope, c.atten_mask),
            *(c.actual_seq_qlen, c.actual_seq_kvlen, c.block_table, c.learnable_sink),
            *(c.dequant_scale_key, c.dequant_scale_value, c.key_quant_mode),
            *(c.num_query_heads, c.num_key_value_heads, c.softmax_scale, c.pre_tokens, c.next_tokens),
            *(c.input_layout, c.sparse_mode, c.block_size, c.return_softmax_lse),
            value_mode=c.value_quant_mode,
        )

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield from super().wrong(c)
        ragged, sink = self.ragged(c), torch.zeros(4).bfloat16()
        yield "needs TND", {"learnable_sink": sink}
        yield "for each query head", {**ragged, "learnable_sink": sink[:2]}
        yield "learnable_sink is bfloat16", {**ragged, "learnable_sink": sink.float()}
        yield "at most 128 dimensions", {**ragged, "learnable_sink": sink, "num_key_value_heads": 1}


class Workspace(Op):
    """The size of the workspace of a captured call."""

    names = (
        "npu::_npu_fused_infer_attention_score_get_max_workspace",
        "npu::_npu_fused_infer_attention_score_v2_get_max_workspace",
        "atb::_npu_paged_attention_get_workspace",
    )
    has_rules = False

    def shapes(self, c: Call) -> Any:
        return torch.empty(1024, dtype=torch.uint8, device="meta")

    def compute(self, c: Call) -> Any:
        return None


class Outputs(Op):
    """The outputs of a captured call, not yet written."""

    names = (
        "npu::_npu_fused_infer_attention_score_infer_output",
        "npu::_npu_fused_infer_attention_score_v2_infer_output",
    )
    has_rules = False

    def shapes(self, c: Call) -> Any:
        arguments = {name: value for name, value in vars(c).items() if name not in ("query", "value")}
        op = torch.ops.npu.npu_fused_infer_attention_score
        if "return_softmax_lse" in arguments:
            op = torch.ops.npu.npu_fused_infer_attention_score_v2
        query, value = (torch.empty_like(x, device="meta") for x in (c.query, c.value))
        return op(query, value, value, **arguments)

    def compute(self, c: Call) -> Any:
        return None


class PagedAttention(Op):
    """No documentation in the wheel: the rules are those of the ATB operation PagedAttention."""

    names = ("atb::_npu_paged_attention",)
    host = ("context_lens",)

    def example(self) -> Changes:
        return {
            "query": torch.randn(3, 4, 128).half(),
            "key_cache": torch.randn(5, 128, 2, 128).half(),
            "value_cache": torch.randn(5, 128, 2, 128).half(),
            "num_kv_heads": 2,
            "num_heads": 4,
            "scale_value": 0.1,
            "block_table": torch.tensor([[1, 2], [3, 0], [4, 0]], dtype=torch.int32),
            "context_lens": torch.tensor([200, 100, 2], dtype=torch.int32),
            "out": torch.zeros(3, 4, 128).half(),
        }

    def check(self, c: Call) -> None:
        name = "_npu_paged_attention"
        pages = c.key_cache.shape
        rule(contiguous(c.query, c.key_cache, c.value_cache, c.block_table, c.out), f"{name}: tensors are contiguous")
        rule(dtype_of(c.query, *COMPUTED), f"{name}: the query is float16 or bfloat16")
        same = c.key_cache.dtype == c.value_cache.dtype == c.out.dtype == c.query.dtype
        rule(same, f"{name}: the query, the caches and the output have one dtype")
        rule(c.query.dim() == 3 and len(pages) == 4, f"{name}: the query has 3, the caches have 4 dimensions")
        rule(c.context_lens.device.type == "cpu", f"{name}: context_lens are on the host")
        is_int = dtype_of(c.context_lens, torch.int32) and dtype_of(c.block_table, torch.int32)
        rule(is_int, f"{name}: context_lens and block_table are int32")
        rule(len(c.context_lens) == len(c.block_table) == len(c.query), f"{name}: each token has a length and a table")
        rule(
            c.query.shape[1] == c.num_heads and pages[2] == c.num_kv_heads,
            f"{name}: the heads are those of the tensors",
        )
        rule(c.num_heads % c.num_kv_heads == 0, f"{name}: kv heads divide the query heads")
        rule(pages[1] % 16 == 0, f"{name}: the block size is a multiple of 16")
        rule(pages[1] * pages[3] <= 128 * 256, f"{name}: block size * dimension is at most 128 * 256")
        rule(c.out.shape == c.query.shape, f"{name}: the output has the shape of the query")

    def compute(self, c: Call) -> Any:
        lens = [int(n) for n in c.context_lens]
        flat = (c.query[:, None], c.key_cache.flatten(2), c.value_cache.flatten(2))
        s = Score(
            "_npu_paged_attention",
            *(*flat, None, None, None, None, lens, c.block_table, None, None, None, 0),
            *(c.num_heads, c.num_kv_heads, c.scale_value, 0, 0, "BSND", 0, c.key_cache.shape[1], False),
        )
        c.out.copy_(compute(s)[0][:, 0])

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "contiguous", {"query": torch.zeros(4, 3, 128).half().transpose(0, 1)}
        yield "float16 or bfloat16", {"query": c.query.double()}
        yield "one dtype", {"value_cache": c.value_cache.bfloat16()}
        yield "4 dimensions", {"key_cache": c.key_cache.flatten(2)}
        yield "on the host", {"context_lens": c.context_lens.to("meta")}
        yield "block_table are int32", {"block_table": c.block_table.long()}
        yield "length and a table", {"context_lens": c.context_lens[:2]}
        yield "those of the tensors", {"num_heads": 2}
        odd = torch.zeros(5, 128, 3, 128).half()
        yield "divide the query heads", {"num_kv_heads": 3, "key_cache": odd, "value_cache": odd}
        yield "multiple of 16", {"key_cache": c.key_cache[:, :72].contiguous()}
        yield "128 * 256", {"key_cache": torch.zeros(5, 512, 2, 128).half()}
        yield "shape of the query", {"out": c.out[:2]}


OPS = (FusedInferAttentionScore(), FusedInferAttentionScoreV2(), Workspace(), Outputs(), PagedAttention())
