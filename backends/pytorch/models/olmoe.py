"""OLMoE: Llama with experts in every layer, and norms of queries and keys over all heads together."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..experts import routed_mlp
from ..layers import AttentionLayer, Decoder
from ..weights import Weights


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def layer(index: int) -> AttentionLayer:
        mlp = routed_mlp(weights, config, index)
        return AttentionLayer(weights, config, index, mlp=mlp, joint_head_norms=True)

    return Decoder(weights, config, context, layer)
