"""A decoder layer, or a whole stack of them, as one op. The reference composes smaller ops; a device may fuse them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from .attention import Attend
from .kv import Append, Rotation
from .mixer import MixerLayer
from .mlp import GatedMlp, Mlp
from .projection import Product, Projection
from .step import LayerStep

if TYPE_CHECKING:
    from . import Ops


class Tail(Protocol):
    """A change of the residual stream after a layer."""

    def __call__(self, x: Tensor, stream: Tensor, ops: Ops, step: LayerStep) -> tuple[Tensor, Tensor]:
        """(x, stream) of `decoder` -> those of the next layer."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights and options of a decoder layer: norm, attention, norm, MLP. Some models also normalise the outputs of
    attention and of the MLP. Norm weights are [hidden]."""

    before_attention: Tensor | None
    before_mlp: Tensor | None  # None: the MLP reads the residual stream, or with `parallel` the input of attention
    after_attention: Tensor | None  # None if and only if after_mlp is None
    after_mlp: Tensor | None
    query_norm: Tensor | None  # [dim], or as joint_head_norms says; None if and only if key_norm is None
    key_norm: Tensor | None
    qkv: Projection
    out: Projection
    mlp: Mlp
    rotation: Rotation
    dim: int  # dimension of a head; of latent attention: of an absorbed query
    eps: float
    offset: float  # added to every norm weight
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None
    # query_norm normalises all heads of the queries together and is [heads * dim]; key_norm is [kv heads * dim].
    joint_head_norms: bool = False
    centred: bool = False  # whether the norm before attention is a layer norm without a bias
    parallel: bool = False  # whether the MLP has the input of attention, so that both are added to the stream
    rotates_first: bool = False  # whether queries and keys are rotated before query_norm and key_norm
    scales_queries: bool = True  # whether LayerStep.query_factors multiply the queries
    stores: bool = True  # False: the layer reads the pages of an earlier layer, and `qkv` has the queries only
    tail: Tail | None = None  # computed after the layer
    cache_index: int = 0  # index of the layer's pages in LayerStep.cache
    rotation_index: int = 0  # index of the layer's cos and sin in LayerStep.rotations
    # Latent attention (mla.py): the first column of the values in the keys of the latent cache; 0: attention with heads
    # of keys and values. `qkv` then has the outputs of mla.LatentInputs.
    value_start: int = 0
    # For each query head `qkv` has the query and a gate [dim]. The sigmoid of the gates multiplies the outputs of
    # attention.
    output_gate: bool = False

    def append(self, step: LayerStep) -> Append:
        """The writes of keys and values to the pages of the step."""
        keys, values = step.cache.layers[self.cache_index]
        query_norm, key_norm = (None, None) if self.joint_head_norms else (self.query_norm, self.key_norm)
        norms = query_norm, key_norm, self.eps, self.offset
        return Append(keys, values, self.rotation, *norms, step.cache.layer_scales(self.cache_index))

    def attend(self, step: LayerStep) -> Attend:
        """The attention over the pages of the step."""
        keys, values = step.cache.layers[self.cache_index]
        scales = step.cache.layer_scales(self.cache_index)
        return Attend(keys, values, self.scale, self.window, self.soft_cap, self.sinks, scales)

    @property
    def is_fusable(self) -> bool:
        """Whether kernels that fuse attention with the norms and products around it can compute this layer."""
        is_plain = not (self.centred or self.joint_head_norms or self.rotates_first or self.output_gate or self.tail)
        return is_plain and self.before_attention is not None and self.before_mlp is not None

    @property
    def products(self) -> tuple[Product, ...]:
        """The products qkv, out, gate_up and down, for kernels that compute a whole layer.

        Empty if one of these projections is not a single product with its inputs in natural order, if the MLP is not a
        GatedMlp, or if the kernels cannot compute the layer.
        """
        if not isinstance(self.mlp, GatedMlp) or not self.is_fusable:
            return ()
        return _single_products(self.qkv, self.out, self.mlp.gate_up, self.mlp.down)

    @property
    def attention_products(self) -> tuple[Product, ...]:
        """The products qkv and out, for kernels that compute a layer without its MLP; empty as `products` is."""
        if not self.is_fusable:
            return ()
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

    Writes keys and values to the layer's pages. With step.sampled the result has only the tokens of step.sampled. An
    implementation may overwrite x and stream.
    """
    norm = ops.norm
    inputs, stream = _add_norm(ops, layer, layer.before_attention, x, stream)
    x = attention(ops, layer, inputs, step)
    if step.sampled is not None:
        tokens = step.sampled.tokens
        stream = stream.index_select(0, tokens)
        if not len(x):
            return x, stream
        inputs = inputs.index_select(0, tokens) if layer.parallel else inputs
        step = step.only_sampled()
    if layer.parallel:
        return x + layer.mlp(inputs, ops, step), stream
    if layer.after_attention is not None:
        x = norm.rms(x, layer.after_attention, layer.eps, layer.offset)
    x, stream = _add_norm(ops, layer, layer.before_mlp, x, stream)
    x = layer.mlp(x, ops, step)
    if layer.after_mlp is not None:
        x = norm.rms(x, layer.after_mlp, layer.eps, layer.offset)
    return (x, stream) if layer.tail is None else layer.tail(x, stream, ops, step)


def _add_norm(ops: Ops, layer: DecoderLayer, weight: Tensor | None, x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
    """(the normalised sum, the sum) of x and the stream. Without a weight the sum is not normalised."""
    if weight is None:
        stream = x + stream
        return stream, stream
    if layer.centred:
        stream = x + stream
        return ops.norm.layer(stream, weight, None, layer.eps), stream
    return ops.norm.add_rms(x, stream, weight, layer.eps, layer.offset)


def _norm_joint_heads(ops: Ops, layer: DecoderLayer, qkv: Tensor) -> Tensor:
    """qkv [tokens, (heads + 2 * kv heads) * dim] with its queries and its keys normalised over all heads together."""
    query_norm = layer.query_norm
    key_norm = layer.key_norm
    assert query_norm is not None
    assert key_norm is not None
    query, key, value = qkv.split([len(query_norm), len(key_norm), len(key_norm)], dim=1)
    query = ops.norm.rms(query, query_norm, layer.eps, layer.offset)
    key = ops.norm.rms(key, key_norm, layer.eps, layer.offset)
    return torch.cat((query, key, value), dim=1)


def attention(ops: Ops, layer: DecoderLayer, x: Tensor, step: LayerStep) -> Tensor:
    """The output of the layer's attention for its normalised input x [tokens, hidden]. Writes keys and values. With
    step.sampled the result has only the tokens of step.sampled."""
    qkv = layer.qkv(x, ops, step)
    gate = None
    if layer.output_gate:
        qkv, gate = _split_gate(layer, qkv, step)
    query = _append(ops, layer, qkv, step)
    if step.sampled is not None:
        tokens = step.sampled.tokens
        if not len(tokens):
            return x[:0]
        query = query.index_select(0, tokens)
        gate = None if gate is None else gate.index_select(0, tokens)
        step = step.only_sampled()
    attended = _attend(ops, layer, query, step).flatten(1)
    if gate is not None:
        attended = attended * gate.sigmoid()
    return layer.out(attended, ops, step)


def _split_gate(layer: DecoderLayer, qkv: Tensor, step: LayerStep) -> tuple[Tensor, Tensor]:
    """(queries, keys and values [tokens, (heads + 2 * kv heads) * dim]; gates [tokens, heads * dim])."""
    key_values = 2 * layer.append(step).kv_heads * layer.dim
    queries, others = qkv.split([qkv.shape[1] - key_values, key_values], dim=1)
    query, gate = queries.unflatten(1, (-1, 2, layer.dim)).unbind(2)
    return torch.cat((query.flatten(1), others), dim=1), gate.flatten(1)


def _append(ops: Ops, layer: DecoderLayer, qkv: Tensor, step: LayerStep) -> Tensor:
    """The queries [tokens, heads, dim] of the outputs of `layer.qkv`. Writes the keys, and the values if the cache has
    values."""
    if layer.value_start:
        assert step.query_factors is None, "no architecture has a latent cache and query factors"
        heads = qkv.view(qkv.shape[0], -1, layer.dim)
        pages = step.cache.layers[layer.cache_index]
        rotation = *step.rotations[layer.rotation_index], layer.rotation
        query: Tensor = ops.kv.append_latent(heads, *rotation, step.slots, pages)
        return query
    if not layer.stores:
        return _rotated_queries(ops, layer, qkv, step)
    if layer.joint_head_norms:
        qkv = _norm_joint_heads(ops, layer, qkv)
    target = layer.append(step)
    if step.query_factors is not None and layer.scales_queries:
        assert layer.query_norm is None, "a norm after the factors would undo them"
        qkv = _multiply_queries(qkv, step.query_factors, 2 * target.kv_heads * layer.dim)
    heads = qkv.view(qkv.shape[0], -1, layer.dim)
    cos, sin = step.rotations[layer.rotation_index]
    if layer.rotates_first:
        heads = _rotated(ops, layer, heads, cos, sin, target.kv_heads)
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    return ops.kv.append(heads, cos, sin, step.slots, target)


def _rotated_queries(ops: Ops, layer: DecoderLayer, queries: Tensor, step: LayerStep) -> Tensor:
    """The queries [tokens, heads, dim], normalised and rotated. The layer stores no keys."""
    heads = queries.view(len(queries), -1, layer.dim)
    assert layer.query_norm is not None
    heads = ops.norm.rms(heads, layer.query_norm, layer.eps, layer.offset)
    rotate = ops.rope.neox if layer.rotation == "neox" else ops.rope.interleaved
    return rotate(heads, heads[:, :1].clone(), *step.rotations[layer.rotation_index])[0]


def _rotated(ops: Ops, layer: DecoderLayer, heads: Tensor, cos: Tensor, sin: Tensor, kv_heads: int) -> Tensor:
    """heads [tokens, heads + 2 * kv heads, dim] with rotated queries and keys."""
    query, key, value = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    rotate = ops.rope.neox if layer.rotation == "neox" else ops.rope.interleaved
    return torch.cat((*rotate(query.contiguous(), key.contiguous(), cos, sin), value), dim=1)


def _attend(ops: Ops, layer: DecoderLayer, query: Tensor, step: LayerStep) -> Tensor:
    """The outputs of attention [tokens, heads, value dim]."""
    if layer.value_start:
        pages = step.cache.layers[layer.cache_index]
        return ops.attention.latent(query, pages, step.rows, layer.scale, layer.value_start)
    return ops.attention.paged(query, step.rows, layer.attend(step))


def _multiply_queries(qkv: Tensor, factors: Tensor, key_value_width: int) -> Tensor:
    """qkv [tokens, width] with its queries multiplied by `factors` [tokens, 1]. The factors come before the rotation,
    so they also apply in a traced step, which computes rotation and attention as one op."""
    query, key_value = qkv.split([qkv.shape[1] - key_value_width, key_value_width], dim=1)
    return torch.cat((query * factors, key_value), dim=1)


def prepare_stack(layers: Sequence[Any]) -> Any:
    """All layers of a model, after `prepare`, in the form that `decoders` of the same device reads. The reference
    returns them unchanged."""
    return tuple(layers)


def decoders(ops: Ops, stack: Iterable[Any], x: Tensor, stream: Tensor, step: LayerStep) -> tuple[Tensor, Tensor]:
    """Calls `decoder`, or the layer itself if it is a MixerLayer, for each layer in turn, with the step of its cache
    group. step.sampled applies to the last layer only."""
    *layers, last = stack
    steps = step.of_groups()
    groups = step.cache.groups or (0,) * (len(layers) + 1)
    inner = steps if step.sampled is None else tuple([group._replace(sampled=None) for group in steps])
    for layer, group in zip(layers, groups, strict=False):
        x, stream = _layer(ops, layer, x, stream, inner[group])
    return _layer(ops, last, x, stream, steps[groups[-1]])


def _layer(ops: Ops, layer: Any, x: Tensor, stream: Tensor, step: LayerStep) -> tuple[Tensor, Tensor]:
    if isinstance(layer, MixerLayer):
        return layer(ops, x, stream, step)
    return ops.layer.decoder(ops, layer, x, stream, step)


@dataclass(frozen=True, slots=True)
class Layer:
    """The implementations of layers on a device. When a model is loaded, `prepare` converts each layer for `decoder`,
    and `prepare_stack` converts the prepared layers for `decoders`."""

    decoder: Callable[..., tuple[Tensor, Tensor]] = decoder
    prepare: Callable[[DecoderLayer], Any] = prepare
    decoders: Callable[..., tuple[Tensor, Tensor]] = decoders
    prepare_stack: Callable[[Sequence[Any]], Any] = prepare_stack
