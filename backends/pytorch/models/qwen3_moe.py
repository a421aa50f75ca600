"""Qwen 3 with experts: Qwen 3, but most layers have a mixture of experts instead of a dense MLP."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..experts import routed_mlp
from ..layers import AttentionLayer, Decoder
from ..weights import Weights


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def layer(index: int) -> AttentionLayer:
        return AttentionLayer(weights, config, index, mlp=routed_mlp(weights, config, index))

    return Decoder(weights, config, context, layer)
