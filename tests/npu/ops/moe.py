"""Routing of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .products import quantised
from .rules import FLOATS, Call, Changes, Op, dtype_of, rule, unsupported


def _top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As topk. Of equal scores, the first."""
    order = scores.sort(dim=-1, descending=True, stable=True)
    return order.values[..., :k], order.indices[..., :k]


class GatingTopKSoftmax(Op):
    names = ("npu::npu_moe_gating_top_k_softmax",)

    def example(self) -> Changes:
        return {"x": torch.randn(5, 8), "k": 2}

    def check(self, c: Call) -> None:
        name = "npu_moe_gating_top_k_softmax"
        unsupported(c.finished)
        rule(dtype_of(c.x, *FLOATS), f"{name}: x is float16, bfloat16 or float32")
        rule(c.x.dim() in (2, 3), f"{name}: x has 2 or 3 dimensions")
        rule(0 < c.k <= min(c.x.shape[-1], 1024), f"{name}: k is 1 to the number of experts, at most 1024")

    def compute(self, c: Call) -> Any:
        weights, experts = _top(c.x.float().softmax(-1), c.k)
        count = experts.numel() // c.k
        rows = torch.arange(experts.numel(), dtype=torch.int32).view(c.k, count).T.reshape(experts.shape)
        return weights.to(c.x.dtype), experts.int(), rows

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "float16, bfloat16 or float32", {"x": c.x.double()}
        yield "2 or 3 dimensions", {"x": c.x[0]}
        yield "number of experts", {"k": 9}


class GatingTopK(Op):
    names = ("npu::npu_moe_gating_top_k",)

    def example(self) -> Changes:
        groups = {"k_group": 2, "group_count": 4, "group_select_mode": 1, "norm_type": 1}
        return {"x": torch.randn(5, 16), "k": 4, "bias": torch.randn(16), **groups}

    def check(self, c: Call) -> None:
        name = "npu_moe_gating_top_k"
        unsupported(c.input_ids, c.tid2eid)
        experts = c.x.shape[-1]
        rule(c.x.dim() == 2, f"{name}: x has 2 dimensions")
        rule(dtype_of(c.x, *FLOATS), f"{name}: x is float16, bfloat16 or float32")
        rule(experts <= 2048, f"{name}: there are at most 2048 experts")
        rule(c.group_count > 0 and experts % c.group_count == 0, f"{name}: group_count divides the experts")
        size = experts // c.group_count
        rule(size > 2, f"{name}: a group has more than 2 experts")
        padded = -(-size // 32) * 32 * c.group_count
        rule(padded <= 2048, f"{name}: groups of multiples of 32 have at most 2048 experts")
        rule(1 <= c.k_group <= c.group_count, f"{name}: k_group is 1 to group_count")
        rule(1 <= c.k <= size * c.k_group, f"{name}: k is 1 to the experts of the selected groups")
        is_bias = c.bias is None or (c.bias.shape == (experts,) and c.bias.dtype == c.x.dtype)
        rule(is_bias, f"{name}: bias has a value for each expert, in the dtype of x")
        rule(c.group_select_mode in (0, 1), f"{name}: group_select_mode is 0 or 1")
        rule(c.norm_type in (0, 1), f"{name}: norm_type is 0 or 1")
        rule(c.renorm == 0, f"{name}: renorm is 0")

    def compute(self, c: Call) -> Any:
        norm = c.x.float().sigmoid() if c.norm_type else c.x.float().softmax(-1)
        scores = norm if c.bias is None else norm + c.bias.float()
        groups = scores.unflatten(-1, (c.group_count, -1))
        best = _top(groups, 2)[0].sum(-1) if c.group_select_mode else groups.amax(-1)
        selected = torch.zeros_like(best, dtype=torch.bool).scatter(1, _top(best, c.k_group)[1], True)
        chosen = _top(groups.masked_fill(~selected[..., None], -torch.inf).flatten(1), c.k)[1]
        weights = norm.gather(1, chosen)
        if c.norm_type:
            weights = weights / (weights.sum(-1, keepdim=True) + c.eps)
        return (weights * c.routed_scaling_factor).to(c.x.dtype), chosen.int(), norm

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "2 dimensions", {"x": c.x[None]}
        yield "float16, bfloat16 or float32", {"x": c.x.double()}
        yield "at most 2048 experts", {"x": torch.zeros(1, 4096)}
        yield "divides the experts", {"group_count": 3}
        yield "more than 2 experts", {"group_count": 8}
        yield "multiples of 32", {"x": torch.zeros(1, 390), "group_count": 130}
        yield "1 to group_count", {"k_group": 5}
        yield "selected groups", {"k": 9}
        yield "for each expert", {"bias": c.bias.half()}
        yield "group_select_mode", {"group_select_mode": 2}
        yield "norm_type", {"norm_type": 2}
        yield "renorm is 0", {"renorm": 1}


class InitRouting(Op):
    names = ("npu::npu_moe_init_routing",)

    def example(self) -> Changes:
        experts = torch.tensor([[1, 3], [0, 1], [3, 2]], dtype=torch.int32)
        rows = torch.arange(6, dtype=torch.int32).view(2, 3).T.contiguous()
        return {"x": torch.randn(3, 8), "row_idx": rows, "expert_idx": experts, "active_num": 3}

    def check(self, c: Call) -> None:
        name = "npu_moe_init_routing"
        rule(c.x.dim() == 2 and c.expert_idx.dim() == 2, f"{name}: x and expert_idx have 2 dimensions")
        rule(dtype_of(c.x, *FLOATS), f"{name}: x is float16, bfloat16 or float32")
        is_int = c.expert_idx.dtype == c.row_idx.dtype == torch.int32
        rule(is_int, f"{name}: expert_idx and row_idx are int32")
        rule(c.expert_idx.shape == c.row_idx.shape, f"{name}: row_idx has the shape of expert_idx")
        rule(c.x.numel() < 2**24, f"{name}: x has less than 2**24 elements")

    def compute(self, c: Call) -> Any:
        order = c.expert_idx.flatten().sort(dim=0, stable=True)
        rows = c.row_idx.flatten()[order.indices]
        count = min(len(c.x), c.active_num) * c.expert_idx.shape[1]
        positions = torch.empty_like(rows)
        positions[rows.long()] = torch.arange(len(rows), dtype=torch.int32)
        return c.x[rows.long() % len(c.x)][:count], positions, order.values

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "2 dimensions", {"x": c.x[None]}
        yield "float16, bfloat16 or float32", {"x": c.x.double()}
        yield "are int32", {"expert_idx": c.expert_idx.long()}
        yield "shape of expert_idx", {"row_idx": c.row_idx[:2]}
        yield "2**24", {"x": torch.empty(3, 2**23, device="meta")}


class InitRoutingV2(Op):
    names = ("npu::npu_moe_init_routing_v2",)

    def example(self) -> Changes:
        return {
            "x": torch.randn(3, 8),
            "expert_idx": torch.tensor([[1, 3], [0, 1], [3, 2]], dtype=torch.int32),
            "active_num": 6,
            "expert_capacity": 0,
            "expert_num": 4,
            "expert_tokens_num_type": 1,
            "expert_tokens_num_flag": True,
            "active_expert_range": [0, 4],
        }

    def check(self, c: Call) -> None:
        name = "npu_moe_init_routing_v2"
        unsupported(c.scale, c.offset, c.x_dtype)
        rule(c.x.dim() == 2 and c.expert_idx.dim() == 2, f"{name}: x and expert_idx have 2 dimensions")
        rule(dtype_of(c.x, *FLOATS, torch.int8), f"{name}: x is float16, bfloat16, float32 or int8")
        rule(dtype_of(c.expert_idx, torch.int32), f"{name}: expert_idx is int32")
        rule(len(c.x) == len(c.expert_idx), f"{name}: each token has its experts")
        rule(c.active_num >= -1, f"{name}: active_num is at least -1")
        most = 5120 if c.expert_tokens_num_type == 2 else 10240
        rule(0 < c.expert_num <= most, f"{name}: expert_num is 1 to 10240")
        rule(c.drop_pad_mode == 0, f"{name}: drop_pad_mode is 0")
        rule(c.expert_tokens_num_type in (1, 2), f"{name}: expert_tokens_num_type is 1 or 2")
        rule(c.expert_tokens_num_flag, f"{name}: expert_tokens_num_flag is True")
        rule(c.quant_mode in (-1, 1), f"{name}: quant_mode is -1 or 1")
        rule(c.quant_mode == -1 or c.x.dtype != torch.int8, f"{name}: int8 is not quantised again")
        first, last = c.active_expert_range or (0, c.expert_num)
        rule(0 <= first < last <= c.expert_num, f"{name}: active_expert_range is within the experts")
        rule(c.row_idx_type in (0, 1), f"{name}: row_idx_type is 0 or 1")

    def compute(self, c: Call) -> Any:
        first, last = c.active_expert_range or (0, c.expert_num)
        experts = c.expert_idx.flatten().long()
        if len(experts) and not 0 <= int(experts.min()) <= int(experts.max()) < c.expert_num:
            raise IndexError(f"npu_moe_init_routing_v2: expert {int(experts.max())} of {c.expert_num}")
        is_active = (experts >= first) & (experts < last)
        order = torch.where(is_active, experts, c.expert_num).argsort(stable=True)
        rows = c.x[order // c.expert_idx.shape[1]]
        scales = torch.full((len(order),), torch.nan)
        if c.quant_mode == 1:
            rows, scales = quantised(rows)
        active = int(is_active.sum())
        rows[active:] = 0 if rows.dtype == torch.int8 else torch.nan
        return rows, self._positions(c, order, active), self._counts(c, experts[is_active], first, last), scales

    def _positions(self, c: Call, order: Tensor, active: int) -> Tensor:
        if c.row_idx_type == 1:
            return order.int()
        positions = torch.full((len(order),), -1, dtype=torch.int32)
        positions[order[:active]] = torch.arange(active, dtype=torch.int32)
        return positions

    def _counts(self, c: Call, experts: Tensor, first: int, last: int) -> Tensor:
        counts = torch.bincount(experts, minlength=c.expert_num)
        if c.expert_tokens_num_type == 1:
            return counts[first:last]
        used = counts.nonzero()[:, 0]
        pairs = torch.zeros(c.expert_num, 2, dtype=torch.int64)
        pairs[: len(used)] = torch.stack((used, counts[used]), 1)
        return pairs

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "2 dimensions", {"x": c.x[None]}
        yield "float32 or int8", {"x": c.x.double()}
        yield "expert_idx is int32", {"expert_idx": c.expert_idx.long()}
        yield "its experts", {"x": c.x[:2]}
        yield "active_num", {"active_num": -2}
        yield "1 to 10240", {"expert_num": 0}
        yield "drop_pad_mode", {"drop_pad_mode": 1}
        yield "expert_tokens_num_type", {"expert_tokens_num_type": 0}
        yield "expert_tokens_num_flag", {"expert_tokens_num_flag": False}
        yield "quant_mode", {"quant_mode": 0}
        yield "not quantised again", {"quant_mode": 1, "x": c.x.to(torch.int8)}
        yield "within the experts", {"active_expert_range": [0, 5]}
        yield "row_idx_type", {"row_idx_type": 2}


class FinalizeRouting(Op):
    names = ("npu::npu_moe_finalize_routing",)

    def example(self) -> Changes:
        return {
            "expanded_permuted_rows": torch.randn(6, 8),
            "skip1": None,
            "skip2": None,
            "bias": torch.randn(4, 8),
            "scales": torch.rand(3, 2),
            "expanded_src_to_dst_row": torch.tensor([1, 0, 4, 5, 2, 3], dtype=torch.int32),
            "export_for_source_row": torch.tensor([[1, 3], [0, 1], [3, 2]], dtype=torch.int32),
            "k": 2,
        }

    def check(self, c: Call) -> None:
        name = "npu_moe_finalize_routing"
        rows = c.expanded_permuted_rows
        floats = [t for t in (c.skip1, c.skip2, c.bias, c.scales) if t is not None]
        rule(dtype_of(rows, *FLOATS), f"{name}: rows are float16, bfloat16 or float32")
        rule(all(t.dtype == rows.dtype for t in floats), f"{name}: skips, bias and scales have the dtype of the rows")
        rule(all(t.dim() == 2 for t in (rows, *floats)), f"{name}: rows, skips, bias and scales have 2 dimensions")
        rule(c.skip2 is None or c.skip1 is not None, f"{name}: skip2 needs skip1")
        rule(dtype_of(c.expanded_src_to_dst_row, torch.int32), f"{name}: expanded_src_to_dst_row is int32")
        rule(c.expanded_src_to_dst_row.shape == rows.shape[:1], f"{name}: expanded_src_to_dst_row has all rows")
        experts = c.export_for_source_row
        rule(dtype_of(experts, torch.int32), f"{name}: export_for_source_row is int32")
        rule(c.bias is None or experts is not None, f"{name}: bias needs export_for_source_row")
        rule(c.drop_pad_mode == 0, f"{name}: drop_pad_mode is 0")
        is_k = c.k > 0 and len(rows) % c.k == 0 and (c.scales is None or c.scales.shape == (len(rows) // c.k, c.k))
        rule(is_k, f"{name}: there are k scales and k rows for each token")

    def compute(self, c: Call) -> Any:
        k = c.k if c.scales is None else c.scales.shape[1]
        rows = c.expanded_permuted_rows[c.expanded_src_to_dst_row.long()].float().unflatten(0, (k, -1)).transpose(0, 1)
        if c.bias is not None:
            rows = rows + c.bias[c.export_for_source_row.long()].float()
        if c.scales is not None:
            rows = rows * c.scales.float()[..., None]
        skips = [skip.float() for skip in (c.skip1, c.skip2) if skip is not None]
        return sum(skips, rows.sum(1)).to(c.expanded_permuted_rows.dtype)

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "rows are float16", {"expanded_permuted_rows": c.expanded_permuted_rows.double()}
        yield "dtype of the rows", {"scales": c.scales.half()}
        yield "2 dimensions", {"bias": c.bias[0]}
        yield "skip2 needs skip1", {"skip2": torch.randn(3, 8)}
        yield "dst_row is int32", {"expanded_src_to_dst_row": c.expanded_src_to_dst_row.long()}
        yield "all rows", {"expanded_src_to_dst_row": c.expanded_src_to_dst_row[:4]}
        yield "source_row is int32", {"export_for_source_row": c.export_for_source_row.long()}
        yield "needs export_for_source_row", {"export_for_source_row": None}
        yield "drop_pad_mode", {"drop_pad_mode": 1}
        yield "k scales", {"k": 3}


class TokenPermute(Op):
    names = ("npu::npu_moe_token_permute",)

    def example(self) -> Changes:
        return {"tokens": torch.randn(3, 8), "indices": torch.tensor([[1, 3], [0, 1], [3, 2]], dtype=torch.int32)}

    def check(self, c: Call) -> None:
        name = "npu_moe_token_permute"
        rule(c.tokens.dim() == 2 and c.indices.dim() in (1, 2), f"{name}: tokens have 2, indices 1 or 2 dimensions")
        rule(dtype_of(c.tokens, *FLOATS), f"{name}: tokens are float16, bfloat16 or float32")
        rule(dtype_of(c.indices, torch.int32, torch.int64), f"{name}: indices are int32 or int64")
        rule(not c.padded_mode, f"{name}: padded_mode is False")

    def compute(self, c: Call) -> Any:
        order = c.indices.flatten().argsort(stable=True)
        rows = c.tokens[order // (c.indices.numel() // len(c.tokens))]
        return rows[: c.num_out_tokens or len(rows)], order.argsort().int()

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "1 or 2 dimensions", {"tokens": c.tokens[None]}
        yield "float16, bfloat16 or float32", {"tokens": c.tokens.double()}
        yield "int32 or int64", {"indices": c.indices.short()}
        yield "padded_mode", {"padded_mode": True}


class TokenUnpermute(Op):
    names = ("npu::npu_moe_token_unpermute",)

    def example(self) -> Changes:
        order = torch.tensor([1, 4, 0, 2, 5, 3], dtype=torch.int32)
        return {"permuted_tokens": torch.randn(6, 8), "sorted_indices": order, "probs": torch.rand(3, 2)}

    def check(self, c: Call) -> None:
        name = "npu_moe_token_unpermute"
        rule(c.permuted_tokens.dim() == 2, f"{name}: permuted_tokens have 2 dimensions")
        rule(dtype_of(c.permuted_tokens, *FLOATS), f"{name}: permuted_tokens are float16, bfloat16 or float32")
        rule(dtype_of(c.sorted_indices, torch.int32), f"{name}: sorted_indices are int32")
        rule(c.sorted_indices.shape == c.permuted_tokens.shape[:1], f"{name}: sorted_indices have all tokens")
        is_probs = c.probs is None or (c.probs.dim() == 2 and c.probs.numel() == len(c.sorted_indices))
        rule(is_probs, f"{name}: probs have all tokens and their experts")
        rule(not c.padded_mode and c.restore_shape is None, f"{name}: padded_mode is False, restore_shape None")
        rule(c.probs is None or c.probs.shape[1] <= 512, f"{name}: a token has at most 512 experts")

    def compute(self, c: Call) -> Any:
        rows = c.permuted_tokens[c.sorted_indices.long()].float()
        if c.probs is not None:
            rows = (rows.unflatten(0, c.probs.shape) * c.probs.float()[..., None]).sum(1)
        return rows.to(c.permuted_tokens.dtype)

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "have 2 dimensions", {"permuted_tokens": c.permuted_tokens[None]}
        yield "float16, bfloat16 or float32", {"permuted_tokens": c.permuted_tokens.double()}
        yield "are int32", {"sorted_indices": c.sorted_indices.long()}
        yield "have all tokens", {"sorted_indices": c.sorted_indices[:4]}
        yield "and their experts", {"probs": c.probs[:2]}
        yield "padded_mode is False", {"padded_mode": True}
        many = {"permuted_tokens": torch.zeros(513, 8), "sorted_indices": torch.zeros(513, dtype=torch.int32)}
        yield "at most 512 experts", {**many, "probs": torch.zeros(1, 513)}


OPS = (
    *(GatingTopKSoftmax(), GatingTopK(), InitRouting(), InitRoutingV2()),
    *(FinalizeRouting(), TokenPermute(), TokenUnpermute()),
)
