"""Hunyuan dense: Llama with norms of queries and keys after their rotation."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..layers import AttentionLayer, Decoder
from ..weights import Weights

HEAD_NORMS = "query_layernorm", "key_layernorm"


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def layer(index: int) -> AttentionLayer:
        return AttentionLayer(weights, config, index, head_norms=HEAD_NORMS, rotates_first=True)

    return Decoder(weights, config, context, layer)
