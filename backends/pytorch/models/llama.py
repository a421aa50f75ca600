"""Llama 1 to 3.x."""

from __future__ import annotations

from ....engine.modelconfig import ModelConfig
from ..layers import Attention, Decoder, GatedMLP, PreNormLayer
from ..weights import Weights


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def layer(index: int) -> PreNormLayer:
        attention, mlp = Attention(weights, config, index), GatedMLP(weights, config, index)
        return PreNormLayer(weights, config, index, attention, mlp)

    return Decoder(weights, config, context, layer)
