"""Llama 1 to 3.x."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..layers import AttentionLayer, Decoder
from ..weights import Weights


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    return Decoder(weights, config, context, lambda index: AttentionLayer(weights, config, index))
