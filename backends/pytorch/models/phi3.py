"""Phi-3 and Phi-3.5: Llama with fused qkv and gate_up weights. The rotary embedding may be partial or LongRoPE."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..experts import MERGED
from ..layers import AttentionLayer, Decoder
from ..weights import Weights


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def layer(index: int) -> AttentionLayer:
        return AttentionLayer(weights, config, index, qkv=("qkv_proj",), mlp_names=MERGED)

    return Decoder(weights, config, context, layer)
