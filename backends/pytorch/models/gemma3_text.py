"""Gemma 3, text only. Norms before and after attention and MLP, with 1 added to their weights; layers with and without
a sliding window."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..layers import AttentionLayer, Decoder, Norms
from ..weights import Weights

OFFSET = 1.0
NORMS = Norms(
    before_mlp="pre_feedforward_layernorm",
    after_attention="post_attention_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    return Decoder(
        weights,
        config,
        context,
        lambda index: AttentionLayer(weights, config, index, norms=NORMS, offset=OFFSET),
        embedding_scale=config.hidden_size**0.5,
        norm_offset=OFFSET,
    )
