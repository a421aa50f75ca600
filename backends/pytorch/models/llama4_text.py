"""Llama 4, text only: a rotary embedding of neighbouring dimensions, layers without a rope whose queries have factors,
norms of heads without weights, and experts whose inputs are scaled, with a shared expert."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ....kernels.ops.mlp import Mlp, ScaledInputExperts
from ..experts import ExpertLayout, expert_weights, gate_of, gated_mlp, routing
from ..layers import AttentionLayer, Decoder
from ..weights import Weights

LAYOUT = ExpertLayout(transposed=True)


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def layer(index: int) -> AttentionLayer:
        mlp = _mlp(weights, config, index)
        return AttentionLayer(weights, config, index, mlp=mlp, rotation="interleaved", unit_head_norms=True)

    return Decoder(weights, config, context, layer)


def _mlp(weights: Weights, config: ModelConfig, index: int) -> Mlp:
    name = f"model.layers.{index}.feed_forward"
    moe = config.moe
    if moe is None or not moe.layers[index]:
        return gated_mlp(weights, config, name, config.intermediate_size)
    hidden = config.hidden_size
    return ScaledInputExperts(
        router=weights.linear([f"{name}.router"], [moe.experts], hidden, quantise=False),
        routing=routing(moe),
        weights=expert_weights(weights, hidden, moe, f"{name}.experts", LAYOUT, gate_of(config)),
        shared=gated_mlp(weights, config, f"{name}.shared_expert", moe.shared_size),
    )
