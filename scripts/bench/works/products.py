"""Linear layers and mixtures of experts in every weight format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import product
from typing import Any

import torch
from shapes import Shape
from torch import Tensor
from torch.nn import functional as F

from localllm.kernels.ops.linear import Fp8, Int4, Int8, Mxfp4
from localllm.kernels.ops.moe import ExpertWeights, Routed, Routing, route

from .work import FLOATS, Arguments, Work, randn

GROUP = 64  # inputs of a scale
REPEATED = 1 << 23  # random numbers that weights repeat: too many for a processor to predict
ROUTING = Routing(8, "softmax", True)
INTEGERS = ("int8", "tile_int8")


@dataclass(frozen=True, slots=True)
class Format:
    op: str
    bytes: float  # size of a weight
    kinds: Sequence[str]


FORMATS = {
    "bf16": Format("dense", 2.0, FLOATS),
    "int8": Format("int8", 1.0, INTEGERS),
    "int4": Format("int4", 0.5 + 3 / GROUP, INTEGERS),
    "int4_wide": Format("int4_wide", 0.5 + 3 / GROUP, FLOATS),
    "fp8": Format("fp8", 1.0, FLOATS),
    "mxfp4": Format("mxfp4", 0.5 + 1 / 32, FLOATS),
}


def numbers(*shape: int) -> Tensor:
    """Normal values [out_features, in_features] in float32. They repeat, which is faster to make."""
    count = shape[0] * shape[1]
    return _normals().repeat(-(-count // REPEATED))[:count].view(shape)


def octets(*shape: int) -> Tensor:
    """Random bytes [out_features, bytes]."""
    count = shape[0] * shape[1]
    return _normals().view(torch.uint8).repeat(-(-count // (4 * REPEATED)))[:count].view(shape)


@cache
def _normals() -> Tensor:
    return torch.randn(REPEATED)


def random_weight(fmt: str, in_features: int, out_features: int) -> Any:
    """A random weight, because the speed depends on the data."""

    def scale(*shape: int) -> Tensor:
        return torch.rand(out_features, *shape) / in_features

    match fmt:
        case "bf16":
            return numbers(out_features, in_features).bfloat16()
        case "int8":
            return Int8(octets(out_features, in_features).view(torch.int8).clamp(min=-127), scale())
        case "fp8":
            return Fp8(numbers(out_features, in_features).to(torch.float8_e4m3fn), scale(1), in_features)
        case "mxfp4":
            exponent = torch.randint(110, 116, (out_features, in_features // 32), dtype=torch.uint8)
            return Mxfp4(octets(out_features, in_features // 2), exponent)
    groups = -(-in_features // GROUP)
    zero = torch.randint(0, 17, (out_features, groups), dtype=torch.uint8)
    return Int4(octets(out_features, in_features // 2), scale(groups).half(), zero, GROUP, in_features)


def linear(shape: Shape, formats: Sequence[str], rows: Sequence[int], dtype: torch.dtype) -> Iterator[Work]:
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    hidden, inner = shape.hidden, shape.inner
    matrices = [(queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)]
    sizes = [*product(rows, matrices), (1, (shape.vocab, hidden))]
    for fmt, (count, (out_features, in_features)) in product(formats, sizes):
        yield Work(
            f"linear.{FORMATS[fmt].op}",
            f"{fmt}, {count} × {in_features} × {out_features}",
            partial(_linear, dtype, fmt, count, in_features, out_features),
            FORMATS[fmt].bytes * in_features * out_features + dtype.itemsize * count * (in_features + out_features),
            partial(_dense, out_features),
            2.0 * count * in_features * out_features,
            FORMATS[fmt].kinds,
            ("weight",),
        )


def _linear(dtype: torch.dtype, fmt: str, count: int, in_features: int, out_features: int) -> Arguments:
    return {"x": randn(dtype, count, in_features), "weight": random_weight(fmt, in_features, out_features)}


def _dense(out_features: int, x: Tensor, weight: object) -> Tensor:
    """torch's linear with an unquantised weight of the same shape, in the dtype of the activations."""
    return F.linear(x, _copies(out_features, x.shape[1], x.dtype, x.device)())


@lru_cache(maxsize=1)
def _copies(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """A function that returns one of several copies of a weight, so that no copy stays in the caches."""
    weight = numbers(out_features, in_features).to(device, dtype)
    copies = [weight.clone() for _ in range(min(32, max(1, 2**28 // weight.nbytes)))]

    def following() -> Tensor:
        copies.append(copies.pop(0))
        return copies[0]

    return following


def moe(shape: Shape, formats: Sequence[str], rows: Sequence[int], dtype: torch.dtype) -> Iterator[Work]:
    """The router and the experts of a mixture of experts. The reads of the chosen experts bound few tokens."""
    experts, hidden, inner = shape.experts, shape.hidden, shape.inner
    routing = ROUTING._replace(top_k=shape.top_k)
    for count in rows:
        logits = partial(_logits, count, experts, routing)
        label = f"{count} × {experts}, top {shape.top_k}"
        yield Work("moe.route", label, logits, 4.0 * count * (experts + 2 * shape.top_k), _route)
    for fmt, count in product(formats, rows):
        routed = route(**_logits(count, experts, routing))
        yield Work(
            "moe.experts",
            f"{fmt}, {count} × {experts} experts, top {shape.top_k}, {hidden} × {inner}",
            partial(_experts, dtype, fmt, routed, shape),
            FORMATS[fmt].bytes * 3 * hidden * inner * len(routed.experts.unique())
            + 2.0 * dtype.itemsize * count * hidden,
            _grouped,
            6.0 * count * shape.top_k * hidden * inner,
            FORMATS[fmt].kinds,
            ("weights",),
        )


def _logits(count: int, experts: int, routing: Routing) -> Arguments:
    return {"logits": torch.randn(count, experts), "routing": routing}


def _route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    weights, experts = logits.softmax(-1).topk(routing.top_k)
    return experts, weights / weights.sum(-1, keepdim=True)


def _experts(dtype: torch.dtype, fmt: str, routed: Routed, shape: Shape) -> Arguments:
    gate_up = random_weight(fmt, shape.hidden, 2 * shape.experts * shape.inner)
    down = random_weight(fmt, shape.inner, shape.experts * shape.hidden)
    weights = ExpertWeights(FORMATS[fmt].op, gate_up, down, shape.experts, shape.inner, "silu_and_mul")
    return {"x": randn(dtype, len(routed.experts), shape.hidden), "routed": routed, "weights": weights}


def _grouped(x: Tensor, routed: Routed, weights: ExpertWeights) -> Tensor:
    """A stable sort and torch's grouped products, with unquantised weights of the same shape."""
    gate_up, down = _plain(weights.experts, weights.inner, x.shape[1], x.dtype, x.device)
    experts, order = routed.experts.flatten().sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(weights.experts, device=x.device), right=True).int()
    token = order // routed.experts.shape[1]
    gate, up = F.grouped_mm(x[token], gate_up, offs=ends).chunk(2, dim=-1)
    results = F.grouped_mm(F.silu(gate) * up, down, offs=ends) * routed.weights.flatten()[order, None].to(x.dtype)
    return torch.zeros_like(x).index_add_(0, token, results)


@lru_cache(maxsize=1)
def _plain(experts: int, inner: int, hidden: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    gate_up = numbers(experts * hidden, 2 * inner).to(device, dtype).view(experts, hidden, 2 * inner)
    return gate_up, numbers(experts * inner, hidden).to(device, dtype).view(experts, inner, hidden)
