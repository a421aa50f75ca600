"""ERNIE 4.5: Llama with a rotary embedding of neighbouring dimensions."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..layers import AttentionLayer, Decoder
from ..weights import Weights


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def layer(index: int) -> AttentionLayer:
        return AttentionLayer(weights, config, index, rotation="interleaved")

    return Decoder(weights, config, context, layer)
