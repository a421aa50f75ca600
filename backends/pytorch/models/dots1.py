"""dots.llm1: Qwen 3 with a sigmoid router with groups and a correction, experts and shared experts."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..experts import ExpertLayout, routed_mlp
from ..layers import AttentionLayer, Decoder
from ..weights import Weights

LAYOUT = ExpertLayout(shared="mlp.shared_experts", correction="gate.e_score_correction_bias")


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def layer(index: int) -> AttentionLayer:
        return AttentionLayer(weights, config, index, mlp=routed_mlp(weights, config, index, LAYOUT))

    return Decoder(weights, config, context, layer)
