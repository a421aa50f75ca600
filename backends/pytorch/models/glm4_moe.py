"""GLM 4.5 to 4.7: dense first layers, then layers with a sigmoid router with a correction, experts and a shared expert.
The rotary embedding is partial."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..experts import ExpertLayout, routed_mlp
from ..layers import AttentionLayer, Decoder
from ..weights import Weights

LAYOUT = ExpertLayout(shared="shared_experts", correction="gate.e_score_correction_bias")


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def layer(index: int) -> AttentionLayer:
        return AttentionLayer(weights, config, index, mlp=routed_mlp(weights, config, index, LAYOUT))

    return Decoder(weights, config, context, layer)
