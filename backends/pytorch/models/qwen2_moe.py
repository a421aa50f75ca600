"""Qwen 2 and 1.5 with experts: Qwen 2 with a router, experts, and a shared expert that a sigmoid gate multiplies."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..experts import ExpertLayout, routed_mlp
from ..layers import AttentionLayer, Decoder
from ..weights import Weights

LAYOUT = ExpertLayout(shared_gate="shared_expert_gate")


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def layer(index: int) -> AttentionLayer:
        return AttentionLayer(weights, config, index, mlp=routed_mlp(weights, config, index, LAYOUT))

    return Decoder(weights, config, context, layer)
