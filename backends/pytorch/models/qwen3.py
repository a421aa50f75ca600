"""Qwen 3: Llama with a norm on each query and key head."""

from __future__ import annotations

from ....engine.modelconfig import ModelConfig
from ..layers import Decoder, DenseLayer
from ..weights import Weights


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    return Decoder(weights, config, context, lambda index: DenseLayer(weights, config, index, head_norms=True))
