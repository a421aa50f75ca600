"""Test inputs and test cases of the ops of layer.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from ..step import Adapters, Cache, LayerStep, SampledRows
from .case import Case, Make
from .lora import random_adapters, random_weights, select_adapters
from .moe import random_experts


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes and the options of random layers."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    hidden: int = 48
    inner: int = 72
    layers: int = 0  # number of layers of a stack; 0: one layer without a stack
    bias: bool = False
    adapted: bool = False  # row r has the adapter of slot r % 3; slot 0 is the base model
    head_norms: bool = True
    joint_head_norms: bool = False
    before_norms: bool = True
    after_norms: bool = False
    offset: float = 0.0
    gate: Gate = "silu_and_mul"
    experts: int = 0  # the MLP has this many experts; 0: the MLP is dense
    shared: bool = True  # a mixture has a shared expert as well
    clear: bool = False  # the router always chooses the same experts, also with rounded inputs
    window: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """Random weights of the layers of a model."""

    model: Model
    generator: torch.Generator
    dtype: torch.dtype

    def random(self, *shape: int, size: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * size + mean).to(self.dtype)

    def norm(self, present: bool, width: int) -> Tensor | None:
        return self.random(width, size=0.1, mean=1.0 - self.model.offset) if present else None

    def projection(self, in_features: int, *widths: int) -> Projection:
        """A random projection with slices of these widths, and the factors of three slots if the model is adapted."""
        shift = None
        if self.model.bias:
            shift = (torch.randn(sum(widths), generator=self.generator) * 0.1).to(self.dtype).float()
        base = Product("dense", self.random(sum(widths), in_features, size=in_features**-0.5), shift)
        if not self.model.adapted:
            return base
        return Adapted(base, random_weights((0, 8, 16), in_features, widths, self.generator, self.dtype))

    def mlp(self) -> Mlp:
        model = self.model
        dense = GatedMlp(
            self.projection(model.hidden, model.inner, model.inner),
            self.projection(model.inner, model.hidden),
            model.gate,
        )
        if not model.experts:
            return dense
        weights = random_experts("dense", model.experts, model.hidden, model.inner, self.generator, self.dtype)
        routing = Routing(2, "softmax", True)
        router = self.projection(model.hidden, model.experts)
        if model.clear:
            bias = torch.arange(model.experts) / 2.0
            router = Product("dense", self.random(model.experts, model.hidden, size=1e-3), bias)
        if not model.shared:
            return Experts(router, routing, None, weights)
        return Experts(router, routing, None, weights, dense, self.projection(model.hidden, 1))

    def layer(self, index: int) -> DecoderLayer:
        model = self.model
        queries, keys = model.heads * model.dim, model.kv_heads * model.dim
        joint = model.joint_head_norms
        return DecoderLayer(
            self.norm(model.before_norms, model.hidden),
            self.norm(model.before_norms, model.hidden),
            self.norm(model.after_norms, model.hidden),
            self.norm(model.after_norms, model.hidden),
            self.norm(model.head_norms, queries if joint else model.dim),
            self.norm(model.head_norms, keys if joint else model.dim),
            self.projection(model.hidden, queries, keys, keys),
            self.projection(queries, model.hidden),
            self.mlp(),
            "neox",
            model.dim,
            1e-6,
            model.offset,
            model.dim**-0.5,
            window=model.window,
            soft_cap=model.soft_cap,
            sinks=model.sinks,
            joint_head_norms=joint,
            cache_index=index,
        )


def inputs(
    lens: list[tuple[int, int]],  # number of queries and context length of each row
    *sizes: Any,  # the first fields of Model
    last: tuple[int, ...] | None = None,  # step.sampled has the last tokens of these rows
    page_size: int = 4,
    **options: Any,  # other fields of Model
) -> Make:
    """Makes random arguments of `decoder` or `decoders`, for test inputs."""
    model = Model(*sizes, **options)

    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        from .. import Ops

        weights = Weights(model, generator, dtype)
        stack = tuple(weights.layer(index) for index in range(max(model.layers, 1)))
        table, slots = _pages(lens, page_size, generator)
        tokens = sum(queries for queries, _ in lens)
        angle = torch.rand(tokens, model.dim // 2, generator=generator) * 100.0
        rows = _rows(lens, table)
        pages = weights.random(2, len(stack), table.numel() + 1, page_size, model.kv_heads, model.dim)
        x = weights.random(tokens, model.hidden)
        stream = weights.random(tokens, model.hidden)
        adapter_rows = [(queries, row % 3) for row, (queries, _) in enumerate(lens)]
        adapters = random_adapters(adapter_rows, generator) if model.adapted else None
        sampled = None if last is None else _sampled(rows, last, adapters)
        cache = Cache(pages[0], pages[1])
        step = LayerStep(rows, slots, [(angle.cos(), angle.sin())], cache, adapters, sampled)
        layers = {"stack": stack} if model.layers else {"layer": stack[0]}
        return {"ops": Ops(), **layers, "x": x, "stream": stream, "step": step}

    return make


def _pages(lens: list[tuple[int, int]], page_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A page table with random pages from 1 on, and the cache slot of each token of the step."""
    row_pages = -(-max(context for _, context in lens) // page_size)
    table = torch.randperm(len(lens) * row_pages, generator=generator).view(len(lens), row_pages).int() + 1
    slots = [
        int(table[row, place // page_size]) * page_size + place % page_size
        for row, (queries, context) in enumerate(lens)
        for place in range(context - queries, context)
    ]
    return table, torch.tensor(slots)


def _rows(lens: list[tuple[int, int]], table: Tensor) -> Rows:
    queries, contexts = zip(*lens, strict=True)
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    return Rows(starts, torch.tensor(contexts).int(), table, queries, contexts)


def _sampled(rows: Rows, last: tuple[int, ...], adapters: Adapters | None) -> SampledRows:
    """The last tokens of the rows `last`."""
    which = torch.tensor(last, dtype=torch.int32)
    tensors = torch.arange(len(last) + 1).int(), rows.context_lens[which], rows.page_table[which]
    sampled_rows = Rows(*tensors, (1,) * len(last), tuple(rows.contexts[row] for row in last))
    tokens = rows.row_starts[1:][which] - 1
    return SampledRows(tokens, sampled_rows, None if adapters is None else select_adapters(adapters, tokens))


def latent_inputs(
    lens: list[tuple[int, int]],
    rank: int = 40,
    dim: int = 16,  # dimensions of the rotated part of a head, of the other part, and of a value head
    heads: int = 4,
    query_rank: int = 0,  # see LatentInputs.queries; 0: none
    adapted: bool = False,
    apart: bool = False,  # whether the cache has rotated keys and latents apart
    **more: Any,
) -> Make:
    """Makes the arguments that `inputs` makes, but with latent attention."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        arguments = inputs(lens, heads, 1, dim, adapted=adapted, **more)(generator, dtype)
        layer: DecoderLayer = arguments["layer"]
        step: LayerStep = arguments["step"]
        weights = Weights(Model(adapted=adapted), generator, dtype)
        projection, random = weights.projection, weights.random
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
        cache = Cache(pages[..., :dim].contiguous(), pages[..., dim:].contiguous()) if apart else Cache(pages, None)
        return {
            **arguments,
            "layer": replace(layer, dim=dim + rank, value_start=dim),
            "step": step._replace(cache=cache),
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
    Case("layer.decoder", "latent-apart", latent_inputs(_MIXED, apart=True), _TOLERANCES, CACHE, ("layer",)),
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
