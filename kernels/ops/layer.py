"""A decoder layer, or a whole stack of them, as one op. The reference composes smaller ops; a device may fuse them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .attention import Rows
from .case import Case
from .kv import Rotation
from .lora import random_adapters, random_weights, select_adapters
from .mlp import Experts, Gate, GatedMlp, Mlp
from .moe import Routing, random_experts
from .projection import Adapted, Product, Projection
from .step import Answers, Cache, LayerStep

if TYPE_CHECKING:
    from . import Ops


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights and options of a decoder layer: norm, attention, norm, MLP. Some models also normalise the outputs of
    attention and of the MLP. Norm weights are [hidden]."""

    before_attention: Tensor
    before_mlp: Tensor
    after_attention: Tensor | None  # None if and only if after_mlp is None
    after_mlp: Tensor | None
    query_norm: Tensor | None  # [dim]; None if and only if key_norm is None
    key_norm: Tensor | None
    qkv: Projection
    out: Projection
    mlp: Mlp
    rotation: Rotation
    dim: int  # dimension of a head
    eps: float
    offset: float  # added to every norm weight
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None
    cache_index: int = 0  # index of the layer's pages in LayerStep.cache
    rotation_index: int = 0  # index of the layer's cos and sin in LayerStep.rotations

    @property
    def products(self) -> tuple[Product, ...]:
        """The products qkv, out, gate_up and down, for kernels that compute a whole layer.

        Empty if one of these projections is not a single product with its inputs in natural order, or if the MLP is not
        a GatedMlp.
        """
        if not isinstance(self.mlp, GatedMlp):
            return ()
        return _single_products(self.qkv, self.out, self.mlp.gate_up, self.mlp.down)

    @property
    def attention_products(self) -> tuple[Product, ...]:
        """The products qkv and out, for kernels that compute a layer without its MLP; empty as `products` is."""
        return _single_products(self.qkv, self.out)


def _single_products(*projections: Projection) -> tuple[Product, ...]:
    """The products of the projections; empty if one of them is not a single product with inputs in natural order."""
    products = [projection.product for projection in projections]
    single = tuple(product for product in products if product is not None and product.order is None)
    return single if len(single) == len(products) else ()


def prepare(layer: DecoderLayer) -> Any:
    """The layer in the form that `decoder` of the same device reads. The reference returns it unchanged."""
    return layer


def decoder(ops: Ops, layer: DecoderLayer, x: Tensor, stream: Tensor, step: LayerStep) -> tuple[Tensor, Tensor]:
    """(x, stream), both [tokens, hidden] -> x and stream of the next layer; x is not yet added to the residual stream.

    Writes keys and values to the layer's pages. With step.answers the result has only the tokens of step.answers. An
    implementation may overwrite x and stream.
    """
    norm = ops.norm
    x, stream = norm.add_rms(x, stream, layer.before_attention, layer.eps, layer.offset)
    qkv = layer.qkv(x, ops, step).view(x.shape[0], -1, layer.dim)
    head_norms = layer.query_norm, layer.key_norm, layer.eps, layer.offset
    rotation = *step.rotations[layer.rotation_index], layer.rotation
    pages = step.cache.layers[layer.cache_index]
    query = ops.kv.append(qkv, *head_norms, *rotation, step.slots, *pages)
    if step.answers is not None:
        tokens = step.answers.tokens
        if not len(tokens):
            return x[:0], stream[:0]
        query = query.index_select(0, tokens)
        stream = stream.index_select(0, tokens)
        step = step.answered()
    options = layer.scale, layer.window, layer.soft_cap, layer.sinks
    attention = ops.attention.paged(query, *pages, step.rows, *options)
    x = layer.out(attention.flatten(1), ops, step)
    if layer.after_attention is not None:
        x = norm.rms(x, layer.after_attention, layer.eps, layer.offset)
    x, stream = norm.add_rms(x, stream, layer.before_mlp, layer.eps, layer.offset)
    x = layer.mlp(x, ops, step)
    if layer.after_mlp is not None:
        x = norm.rms(x, layer.after_mlp, layer.eps, layer.offset)
    return x, stream


def prepare_stack(layers: Sequence[Any]) -> Any:
    """All layers of a model, after `prepare`, in the form that `decoders` of the same device reads. The reference
    returns them unchanged."""
    return tuple(layers)


def decoders(ops: Ops, stack: Iterable[Any], x: Tensor, stream: Tensor, step: LayerStep) -> tuple[Tensor, Tensor]:
    """Calls `decoder` for each layer in turn. step.answers applies to the last layer only."""
    *layers, last = stack
    inner = step if step.answers is None else step._replace(answers=None)
    for layer in layers:
        x, stream = ops.layer.decoder(ops, layer, x, stream, inner)
    return ops.layer.decoder(ops, last, x, stream, step)


@dataclass(frozen=True, slots=True)
class Layer:
    """The implementations of layers on a device. When a model is loaded, `prepare` converts each layer for `decoder`,
    and `prepare_stack` converts the prepared layers for `decoders`."""

    decoder: Callable[..., tuple[Tensor, Tensor]] = decoder
    prepare: Callable[[DecoderLayer], Any] = prepare
    decoders: Callable[..., tuple[Tensor, Tensor]] = decoders
    prepare_stack: Callable[[Sequence[Any]], Any] = prepare_stack


def inputs(
    lens: list[tuple[int, int]],  # number of queries and context length of each row
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    hidden: int = 48,
    inner: int = 72,
    *,
    layers: int = 0,  # number of layers of a stack; 0: one layer without a stack
    last: tuple[int, ...] | None = None,  # step.answers has the last tokens of these rows
    bias: bool = False,
    adapted: bool = False,  # row r has the adapter of slot r % 3; slot 0 is the base model
    head_norms: bool = True,
    after_norms: bool = False,
    offset: float = 0.0,
    gate: Gate = "silu_and_mul",
    experts: int = 0,  # the MLP has this many experts, and a shared expert; 0: the MLP is dense
    page_size: int = 4,
    **options: Any,
) -> Callable[[torch.Generator, torch.dtype], Mapping[str, Any]]:
    """Makes random arguments of `decoder` or `decoders`, for test inputs."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        from . import Ops

        def random(*shape: int, size: float = 1.0, mean: float = 0.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * size + mean).to(dtype)

        def projection(in_features: int, *widths: int) -> Projection:
            shift = random(sum(widths), size=0.1).float() if bias else None
            base = Product("dense", random(sum(widths), in_features, size=in_features**-0.5), shift)
            if not adapted:
                return base
            return Adapted(base, random_weights((0, 8, 16), in_features, widths, generator, dtype))

        def norm(present: bool, width: int) -> Tensor | None:
            return random(width, size=0.1, mean=1.0 - offset) if present else None

        def mlp() -> Mlp:
            dense = GatedMlp(projection(hidden, inner, inner), projection(inner, hidden), gate)
            if not experts:
                return dense
            weights = random_experts("dense", experts, hidden, inner, generator, dtype)
            routing = Routing(2, "softmax", True)
            return Experts(projection(hidden, experts), routing, None, weights, dense, projection(hidden, 1))

        def layer(index: int) -> DecoderLayer:
            return DecoderLayer(
                random(hidden, size=0.1, mean=1.0 - offset),
                random(hidden, size=0.1, mean=1.0 - offset),
                norm(after_norms, hidden),
                norm(after_norms, hidden),
                norm(head_norms, dim),
                norm(head_norms, dim),
                projection(hidden, heads * dim, kv_heads * dim, kv_heads * dim),
                projection(heads * dim, hidden),
                mlp(),
                "neox",
                dim,
                1e-6,
                offset,
                dim**-0.5,
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
        answers = None
        if last is not None:
            which = torch.tensor(last, dtype=torch.int32)
            tensors = torch.arange(len(last) + 1).int(), rows.context_lens[which], table[which]
            answered = Rows(*tensors, (1,) * len(last), tuple(contexts[row] for row in last))
            tokens_answered = starts[1:][which] - 1
            answer_adapters = None if adapters is None else select_adapters(adapters, tokens_answered)
            answers = Answers(tokens_answered, answered, answer_adapters)
        step = LayerStep(rows, torch.tensor(slots), [(angle.cos(), angle.sin())], cache, adapters, answers)
        model = {"stack": stack} if layers else {"layer": stack[0]}
        return {"ops": Ops(), **model, "x": x, "stream": stream, "step": step}

    return make


_MIXED = [(1, 9), (1, 1), (5, 5), (3, 12), (1, 6)]
_WIDE: dict[str, Any] = {"heads": 8, "kv_heads": 2, "dim": 64, "hidden": 256, "inner": 192, "page_size": 16}
_TOLERANCES = {torch.float32: 5e-5, torch.bfloat16: 4e-2}
_EXPERTS_TOLERANCES = {torch.float32: 5e-5}

CACHE = "step.cache.keys", "step.cache.values"  # arguments that the ops write

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
            ("odd-shape", inputs(_MIXED, heads=3, kv_heads=1, dim=34, hidden=37, inner=45)),
            ("last-tokens", inputs(_MIXED, last=(0, 2, 3))),
            ("no-last-tokens", inputs([(7, 7)], last=())),
            ("adapters", inputs(_MIXED, adapted=True)),
            ("adapters-decode", inputs([(1, 9), (1, 1), (1, 16), (1, 7)], adapted=True, after_norms=True)),
            ("adapters-last-tokens", inputs(_MIXED, adapted=True, last=(0, 2, 3))),
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
        ]
    ),
    *(
        Case("layer.decoders", label, make, _TOLERANCES, mutates=CACHE, packs=("stack",))
        for label, make in [
            ("one-row", inputs([(1, 10)], layers=3)),
            ("decode", inputs([(1, 9), (1, 1), (1, 16), (1, 7)], layers=2)),
            ("mixed", inputs(_MIXED, layers=2)),
            ("last-tokens", inputs(_MIXED, layers=3, last=(1, 2))),
            ("wide", inputs([(1, 150)], layers=2, **_WIDE)),
            ("wide-rows", inputs([(1, 9), (1, 1), (1, 300)], layers=3, **_WIDE)),
            ("wide-plain-heads", inputs([(1, 33)], layers=2, head_norms=False, bias=True, **_WIDE)),
        ]
    ),
]
