"""Gemma 4, text only: Gemma 3 with other heads in full layers, a norm of values, layers that read the cache of earlier
layers, an input of its own for each layer (E2B, E4B), and experts beside the dense MLP (26B-A4B)."""

from __future__ import annotations

import torch
from torch import Tensor

from ....engine.files.layer_config import LayerConfig
from ....engine.files.model_config import ModelConfig
from ....kernels.ops import Ops
from ....kernels.ops.layer import DecoderLayer
from ....kernels.ops.mlp import Mlp
from ....kernels.ops.per_layer import DenseAndExperts, LayerInput, NormedValues
from ....kernels.ops.projection import Projection
from ....kernels.ops.step import HeadStep
from ..experts import ExpertLayout, expert_weights, gate_of, gated_mlp, routing
from ..inputs import Step
from ..layers import Decoder, rotation_index
from ..weights import Weights


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    layers = config.layers
    assert layers is not None
    return Decoder(
        weights,
        config,
        context,
        lambda index: _Layer(weights, config, layers, index),
        embedding_scale=config.hidden_size**0.5,
        layer_inputs=_Inputs(weights, config, layers) if layers.input_dim else None,
    )


class _Layer:
    def __init__(self, weights: Weights, config: ModelConfig, layers: LayerConfig, index: int) -> None:
        name = f"model.layers.{index}"
        hidden = config.hidden_size
        self.kind = config.layer_kinds[index]
        _, dim = config.heads_of(self.kind)
        stores = index < config.cached_layers

        def norm(suffix: str, width: int = hidden) -> Tensor:
            return weights.take(f"{name}.{suffix}.weight", (width,))

        self.prepared = weights.prepare(
            DecoderLayer(
                before_attention=norm("input_layernorm"),
                before_mlp=None if config.moe else norm("pre_feedforward_layernorm"),
                after_attention=norm("post_attention_layernorm"),
                after_mlp=norm("post_feedforward_layernorm"),
                query_norm=norm("self_attn.q_norm", dim),
                key_norm=norm("self_attn.k_norm", dim) if stores else None,
                qkv=_inputs(weights, config, layers, index),
                out=weights.linear([f"{name}.self_attn.o_proj"], [hidden], config.num_heads * dim, config.output_bias),
                mlp=_mlp(weights, config, layers, index),
                rotation="neox",
                dim=dim,
                eps=config.norm_eps,
                offset=0.0,
                scale=config.attention_scale,
                window=config.window if self.kind == "sliding" else 0,
                stores=stores,
                tail=_tail(weights, config, layers, index),
                cache_index=config.cache_index(index),
                rotation_index=rotation_index(config, index),
            )
        )


def _inputs(weights: Weights, config: ModelConfig, layers: LayerConfig, index: int) -> Projection:
    """The queries, and in a layer with a cache of its own the keys and values."""
    attention = f"model.layers.{index}.self_attn"
    kind = config.layer_kinds[index]
    kv_heads, dim = config.heads_of(kind)
    widths = {"q_proj": config.num_heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
    equal = layers.keys_are_values and kind == "full"
    names = list(widths)[: 2 if equal else 3] if index < config.cached_layers else ["q_proj"]
    outputs = [widths[name] for name in names]
    projection = weights.linear([f"{attention}.{name}" for name in names], outputs, config.hidden_size, config.qkv_bias)
    if len(names) == 1:
        return projection
    unit = torch.ones(dim, device=weights.device)
    return NormedValues(projection, kv_heads, unit, equal, config.norm_eps)


def _mlp(weights: Weights, config: ModelConfig, layers: LayerConfig, index: int) -> Mlp:
    name = f"model.layers.{index}"
    hidden = config.hidden_size
    factor = 1 if index < config.cached_layers else layers.shared_mlp_factor
    dense = gated_mlp(weights, config, f"{name}.mlp", factor * config.intermediate_size)
    moe = config.moe
    if moe is None:
        return dense

    def norm(suffix: str) -> Tensor:
        return weights.take(f"{name}.{suffix}.weight", (hidden,))

    return DenseAndExperts(
        dense=dense,
        router=weights.linear([f"{name}.router.proj"], [moe.experts], hidden, quantise=False),
        routing=routing(moe),
        expert_scales=weights.take(f"{name}.router.per_expert_scale", (moe.experts,)).float(),
        weights=expert_weights(weights, hidden, moe, f"{name}.experts", ExpertLayout(), gate_of(config)),
        before_dense=norm("pre_feedforward_layernorm"),
        before_router=weights.take(f"{name}.router.scale", (hidden,)).float() * hidden**-0.5,
        before_experts=norm("pre_feedforward_layernorm_2"),
        after_dense=norm("post_feedforward_layernorm_1"),
        after_experts=norm("post_feedforward_layernorm_2"),
        eps=config.norm_eps,
    )


def _tail(weights: Weights, config: ModelConfig, layers: LayerConfig, index: int) -> LayerInput:
    name = f"model.layers.{index}"
    hidden = config.hidden_size
    dim = layers.input_dim
    return LayerInput(
        layer=index,
        gate=weights.linear([f"{name}.per_layer_input_gate"], [dim], hidden) if dim else None,
        activation=gate_of(config),
        projection=weights.linear([f"{name}.per_layer_projection"], [hidden], dim) if dim else None,
        norm=weights.take(f"{name}.post_per_layer_input_norm.weight", (hidden,)) if dim else None,
        scale=weights.take(f"{name}.layer_scalar", (1,)).to(weights.dtype),
        eps=config.norm_eps,
    )


class _Inputs:
    """The sum of an embedding of the token and a projection of its main embedding, for each layer."""

    def __init__(self, weights: Weights, config: ModelConfig, layers: LayerConfig) -> None:
        width = config.num_layers * layers.input_dim
        self._table = weights.table("model.embed_tokens_per_layer", (layers.input_vocab, width))
        self._projection = weights.linear(["model.per_layer_model_projection"], [width], config.hidden_size)
        self._norm = weights.take("model.per_layer_projection_norm.weight", (layers.input_dim,))
        self._eps = config.norm_eps
        self._layers = config.num_layers
        self._scales = layers.input_dim**0.5, config.hidden_size**-0.5, 2**-0.5

    def __call__(self, step: Step, x: Tensor, ops: Ops) -> Tensor:
        """See layers.LayerInputs."""
        table_scale, projection_scale, sum_scale = self._scales
        table = ops.linear.embedding(step.tokens, self._table, table_scale, x.dtype)
        projected = self._projection(x, ops, HeadStep(step.adapters)) * projection_scale
        normed = ops.norm.rms(projected.unflatten(1, (self._layers, -1)).contiguous(), self._norm, self._eps, 0.0)
        inputs: Tensor = (normed + table.unflatten(1, (self._layers, -1))) * sum_scale
        return inputs.transpose(0, 1).contiguous()
