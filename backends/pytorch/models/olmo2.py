"""OLMo 2: norms only after attention and MLP, and norms of queries and keys over all heads together."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..layers import AttentionLayer, Decoder, Norms
from ..weights import Weights

NORMS = Norms(
    before_attention="",
    before_mlp="",
    after_attention="post_attention_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def layer(index: int) -> AttentionLayer:
        return AttentionLayer(weights, config, index, norms=NORMS, joint_head_norms=True)

    return Decoder(weights, config, context, layer)
