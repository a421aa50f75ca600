"""Test inputs and test cases of the ops of layer.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..attention import Rows
from ..layer import DecoderLayer
from ..lora import Adapted
from ..mla import LatentInputs, LatentOutputs
from ..mlp import Experts, Gate, GatedMlp, Mlp
from ..moe import Routing
from ..projection import Product, Projection
from ..step import Cache, LayerStep, SampledRows
from .case import Case, Make
from .lora import random_adapters, random_weights, select_adapters
from .moe import random_experts


def inputs(
    lens: list[tuple[int, int]],  # number of queries and context length of each row
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    hidden: int = 48,
    inner: int = 72,
    *,
    layers: int = 0,  # number of layers of a stack; 0: one layer without a stack
    last: tuple[int, ...] | None = None,  # step.sampled has the last tokens of these rows
    bias: bool = False,
    adapted: bool = False,  # row r has the adapter of slot r % 3; slot 0 is the base model
    head_norms: bool = True,
    joint_head_norms: bool = False,
    before_norms: bool = True,
    after_norms: bool = False,
    offset: float = 0.0,
    gate: Gate = "silu_and_mul",
    experts: int = 0,  # the MLP has this many experts; 0: the MLP is dense
    shared: bool = True,  # a mixture has a shared expert as well
    clear: bool = False,  # the router always chooses the same experts, also with rounded inputs
    page_size: int = 4,
    **options: Any,
) -> Callable[[torch.Generator, torch.dtype], Mapping[str, Any]]:
    """Makes random arguments of `decoder` or `decoders`, for test inputs."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        from .. import Ops

        def random(*shape: int, size: float = 1.0, mean: float = 0.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * size + mean).to(dtype)

        projection = partial(_projection, generator, dtype, bias, adapted)

        def norm(present: bool, width: int) -> Tensor | None:
            return random(width, size=0.1, mean=1.0 - offset) if present else None

        def mlp() -> Mlp:
            dense = GatedMlp(projection(hidden, inner, inner), projection(inner, hidden), gate)
            if not experts:
                return dense
            weights = random_experts("dense", experts, hidden, inner, generator, dtype)
            routing = Routing(2, "softmax", True)
            router = projection(hidden, experts)
            if clear:
                router = Product("dense", random(experts, hidden, size=1e-3), torch.arange(experts) / 2.0)
            if not shared:
                return Experts(router, routing, None, weights)
            return Experts(router, routing, None, weights, dense, projection(hidden, 1))

        def layer(index: int) -> DecoderLayer:
            return DecoderLayer(
                norm(before_norms, hidden),
                norm(before_norms, hidden),
                norm(after_norms, hidden),
                norm(after_norms, hidden),
                norm(head_norms, heads * dim if joint_head_norms else dim),
                norm(head_norms, kv_heads * dim if joint_head_norms else dim),
                projection(hidden, heads * dim, kv_heads * dim, kv_heads * dim),
                projection(heads * dim, hidden),
                mlp(),
                "neox",
                dim,
                1e-6,
                offset,
                dim**-0.5,
                joint_head_norms=joint_head_norms,
                cache_index=index,
                **options,
            )

        stack = tuple(layer(index) for index in range(max(layers, 1)))
        queries = [query_len for query_len, _ in lens]
        contexts = [context_len for _, context_len in lens]
        row_pages = -(-max(contexts) // page_size)
        table = torch.randperm(len(lens) * row_pages, generator=generator).view(len(lens), row_pages).int() + 1
        slots = [
            int(table[row, place // page_size]) * page_size + place % page_size
            for row, (queried, context) in enumerate(lens)
            for place in range(context - queried, context)
        ]
        tokens = sum(queries)
        angle = torch.rand(tokens, dim // 2, generator=generator) * 100.0
        starts = torch.tensor([0, *queries]).cumsum(0).int()
        pages = random(2, len(stack), len(lens) * row_pages + 1, page_size, kv_heads, dim)
        x = random(tokens, hidden)
        stream = random(tokens, hidden)
        rows = Rows(starts, torch.tensor(contexts).int(), table, tuple(queries), tuple(contexts))
        cache = Cache(pages[0], pages[1])
        adapter_rows = [(query_len, row % 3) for row, query_len in enumerate(queries)]
        adapters = random_adapters(adapter_rows, generator) if adapted else None
        sampled = None
        if last is not None:
            which = torch.tensor(last, dtype=torch.int32)
            tensors = torch.arange(len(last) + 1).int(), rows.context_lens[which], table[which]
            sampled_rows = Rows(*tensors, (1,) * len(last), tuple(contexts[row] for row in last))
            sampled_tokens = starts[1:][which] - 1
            sampled_adapters = None if adapters is None else select_adapters(adapters, sampled_tokens)
            sampled = SampledRows(sampled_tokens, sampled_rows, sampled_adapters)
        step = LayerStep(rows, torch.tensor(slots), [(angle.cos(), angle.sin())], cache, adapters, sampled)
        model = {"stack": stack} if layers else {"layer": stack[0]}
        return {"ops": Ops(), **model, "x": x, "stream": stream, "step": step}

    return make


def _projection(
    generator: torch.Generator, dtype: torch.dtype, bias: bool, adapted: bool, in_features: int, *widths: int
) -> Projection:
    """A random projection with slices of these widths. `adapted`: with factors of three adapter slots."""
    shift = (torch.randn(sum(widths), generator=generator) * 0.1).to(dtype).float() if bias else None
    weight = (torch.randn(sum(widths), in_features, generator=generator) * in_features**-0.5).to(dtype)
    base = Product("dense", weight, shift)
    if not adapted:
        return base
    return Adapted(base, random_weights((0, 8, 16), in_features, widths, generator, dtype))


def latent_inputs(
    lens: list[tuple[int, int]],
    rank: int = 40,
    dim: int = 16,  # dimensions of the rotated part of a head, of the other part, and of a value head
    heads: int = 4,
    query_rank: int = 0,  # see LatentInputs.queries; 0: none
    adapted: bool = False,
    **more: Any,
) -> Callable[[torch.Generator, torch.dtype], Mapping[str, Any]]:
    """Makes the arguments that `inputs` makes, but with latent attention."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        def random(*shape: int, size: float, mean: float = 0.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * size + mean).to(dtype)

        arguments = inputs(lens, heads, 1, dim, adapted=adapted, **more)(generator, dtype)
        layer: DecoderLayer = arguments["layer"]
        step: LayerStep = arguments["step"]
        projection = partial(_projection, generator, dtype, False, adapted)
        hidden = arguments["x"].shape[1]
        queries = 2 * heads * dim
        qkv = LatentInputs(
            down=projection(hidden, query_rank or queries, rank + dim),
            query_norm=random(query_rank, size=0.1, mean=1.0) if query_rank else None,
            queries=projection(query_rank, queries) if query_rank else None,
            latent_norm=random(rank, size=0.1, mean=1.0),
            keys=random(heads, dim, rank, size=rank**-0.5),
            rotary=dim,
            eps=1e-6,
        )
        out = LatentOutputs(random(heads, rank, dim, size=rank**-0.5), layer.out)
        layer = replace(layer, query_norm=None, key_norm=None, qkv=qkv, out=out, rotation="interleaved")
        keys = step.cache.layers[0][0]
        pages = random(1, *keys.shape[:3], dim + rank, size=1.0)
        return {
            **arguments,
            "layer": replace(layer, dim=dim + rank, value_start=dim),
            "step": step._replace(cache=Cache(pages, None)),
        }

    return make


def _with_query_factors(make: Make) -> Make:
    """Makes the same arguments, and random query factors in the step."""

    def make_with_factors(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        arguments = make(generator, dtype)
        factors = torch.rand(len(arguments["x"]), 1, generator=generator).to(dtype) + 1
        return {**arguments, "step": arguments["step"]._replace(query_factors=factors)}

    return make_with_factors


_MIXED = [(1, 9), (1, 1), (5, 5), (3, 12), (1, 6)]
_PANELS: dict[str, Any] = {"hidden": 64, "inner": 32}  # sizes of experts that one kernel of the CPU computes
_WIDE: dict[str, Any] = {"heads": 8, "kv_heads": 2, "dim": 64, "hidden": 256, "inner": 192, "page_size": 16}
_OLMO: dict[str, Any] = {"joint_head_norms": True, "before_norms": False, "after_norms": True}
_TOLERANCES = {torch.float32: 5e-5, torch.bfloat16: 4e-2}
_EXPERTS_TOLERANCES = {torch.float32: 5e-5}

CACHE = "step.cache.keys", "step.cache.values"  # arguments that the ops write
LATENT_CACHE = ("step.cache.keys",)

CASES = [
    *(
        Case("layer.decoder", label, make, _TOLERANCES, mutates=CACHE, packs=("layer",))
        for label, make in [
            ("one-row", inputs([(1, 10)])),
            ("decode", inputs([(1, 9), (1, 1), (1, 16), (1, 7)])),
            ("prompt", inputs([(33, 33)])),
            ("mixed", inputs(_MIXED)),
            ("plain-heads", inputs(_MIXED, head_norms=False)),
            ("bias", inputs(_MIXED, bias=True)),
            ("gemma", inputs(_MIXED, after_norms=True, offset=1.0, gate="gelu_tanh_and_mul", window=4)),
            ("soft-cap", inputs(_MIXED, soft_cap=2.0, gate="gelu_and_mul")),
            ("sinks", inputs(_MIXED, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))),
            ("query-factors", _with_query_factors(inputs(_MIXED, head_norms=False))),
            ("query-factors-last-tokens", _with_query_factors(inputs(_MIXED, head_norms=False, last=(0, 2, 3)))),
            ("olmo", inputs(_MIXED, **_OLMO)),
            ("olmo-last-tokens", inputs(_MIXED, last=(0, 2, 3), **_OLMO)),
            ("olmo-adapters", inputs(_MIXED, adapted=True, **_OLMO)),
            ("odd-shape", inputs(_MIXED, heads=3, kv_heads=1, dim=34, hidden=37, inner=45)),
            ("last-tokens", inputs(_MIXED, last=(0, 2, 3))),
            ("no-last-tokens", inputs([(7, 7)], last=())),
            ("adapters", inputs(_MIXED, adapted=True)),
            ("adapters-decode", inputs([(1, 9), (1, 1), (1, 16), (1, 7)], adapted=True, after_norms=True)),
            ("adapters-last-tokens", inputs(_MIXED, adapted=True, last=(0, 2, 3))),
            ("clear-experts", inputs(_MIXED, experts=6, clear=True)),
            ("clear-experts-decode", inputs([(1, 9), (1, 1), (1, 16)], experts=6, clear=True, after_norms=True)),
            ("clear-experts-of-panels", inputs(_MIXED, experts=6, clear=True, after_norms=True, **_PANELS)),
            ("adapters-odd-shape", inputs(_MIXED, adapted=True, heads=3, kv_heads=1, dim=34, hidden=37, inner=45)),
        ]
    ),
    # float32 only: with rounded inputs a router may choose other experts.
    *(
        Case("layer.decoder", label, make, _EXPERTS_TOLERANCES, mutates=CACHE, packs=("layer",))
        for label, make in [
            ("experts", inputs(_MIXED, experts=6)),
            ("experts-last-tokens", inputs(_MIXED, experts=6, last=(0, 2, 3), after_norms=True)),
            ("experts-adapters", inputs(_MIXED, experts=6, last=(1, 2), adapted=True)),
            ("experts-of-panels", inputs(_MIXED, experts=6, last=(0, 2, 3), **_PANELS)),
        ]
    ),
    *(
        Case("layer.decoder", label, make, _TOLERANCES, mutates=LATENT_CACHE, packs=("layer",))
        for label, make in [
            ("latent", latent_inputs(_MIXED)),
            ("latent-queries", latent_inputs(_MIXED, query_rank=24)),
            ("latent-last-tokens", latent_inputs(_MIXED, query_rank=24, last=(0, 2, 3))),
            ("latent-adapters", latent_inputs(_MIXED, query_rank=24, last=(1, 2), adapted=True)),
            ("latent-wide", latent_inputs([(1, 40), (5, 33)], 512, 64, heads=16, hidden=64, page_size=16)),
        ]
    ),
    *(
        Case("layer.decoders", label, make, _TOLERANCES, mutates=CACHE, packs=("stack",))
        for label, make in [
            ("one-row", inputs([(1, 10)], layers=3)),
            ("decode", inputs([(1, 9), (1, 1), (1, 16), (1, 7)], layers=2)),
            ("mixed", inputs(_MIXED, layers=2)),
            ("last-tokens", inputs(_MIXED, layers=3, last=(1, 2))),
            ("query-factors", _with_query_factors(inputs([(1, 150)], layers=2, head_norms=False, **_WIDE))),
            ("olmo-decode", inputs([(1, 9), (1, 1)], layers=2, **_OLMO)),
            ("olmo-one-row", inputs([(1, 150)], layers=2, **_WIDE, **_OLMO)),
            ("wide", inputs([(1, 150)], layers=2, **_WIDE)),
            ("wide-rows", inputs([(1, 9), (1, 1), (1, 300)], layers=3, **_WIDE)),
            ("clear-experts", inputs([(1, 9), (1, 1)], layers=2, experts=6, clear=True, shared=False, **_PANELS)),
            ("clear-experts-last-tokens", inputs(_MIXED, layers=2, last=(0, 2), experts=6, clear=True, **_PANELS)),
            ("window-norms", inputs(_MIXED, layers=2, window=5, soft_cap=2.0, after_norms=True, bias=True)),
            ("wide-plain-heads", inputs([(1, 33)], layers=2, head_norms=False, bias=True, **_WIDE)),
        ]
    ),
]
