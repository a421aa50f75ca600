"""ERNIE 4.5 with experts: a softmax router with a correction, experts and shared experts."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..experts import ExpertLayout, routed_mlp
from ..layers import AttentionLayer, Decoder
from ..weights import Weights

LAYOUT = ExpertLayout(shared="mlp.shared_experts", correction="moe_statics.e_score_correction_bias")


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def layer(index: int) -> AttentionLayer:
        mlp = routed_mlp(weights, config, index, LAYOUT)
        return AttentionLayer(weights, config, index, mlp=mlp, rotation="interleaved")

    return Decoder(weights, config, context, layer)
