"""MiniMax M2: Mixtral with a sigmoid router with a correction, a partial rotary embedding, and norms of queries and
keys over all heads together."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..experts import routed_mlp
from ..layers import AttentionLayer, Decoder
from ..weights import Weights
from .mixtral import layout_of


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    layout = layout_of(weights)._replace(correction="e_score_correction_bias")

    def layer(index: int) -> AttentionLayer:
        mlp = routed_mlp(weights, config, index, layout)
        return AttentionLayer(weights, config, index, mlp=mlp, joint_head_norms=True)

    return Decoder(weights, config, context, layer)
