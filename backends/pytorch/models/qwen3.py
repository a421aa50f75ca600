"""Qwen 3: Llama with normalised query and key heads."""

from __future__ import annotations

from ....engine.modelconfig import ModelConfig
from ..layers import Attention, Decoder, GatedMLP, PreNormLayer, RMSNorm
from ..weights import Weights


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def head_norm(name: str) -> RMSNorm:
        return RMSNorm(weights, name, config.head_dim, config.norm_eps)

    def layer(index: int) -> PreNormLayer:
        attention = Attention(weights, config, index, head_norm=head_norm)
        return PreNormLayer(weights, config, index, attention, GatedMLP(weights, config, index))

    return Decoder(weights, config, context, layer)
