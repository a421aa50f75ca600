"""Gemma 1: Llama with 1 added to the weights of norms, and scaled embeddings."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..layers import AttentionLayer, Decoder
from ..weights import Weights

OFFSET = 1.0


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    return Decoder(
        weights,
        config,
        context,
        lambda index: AttentionLayer(weights, config, index, offset=OFFSET),
        embedding_scale=config.hidden_size**0.5,
        norm_offset=OFFSET,
    )
