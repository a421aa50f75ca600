"""GLM 4 (0414): norms before and after attention and MLP, a merged gate_up weight, and a partial rotary embedding of
neighbouring dimensions."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..experts import MERGED
from ..layers import AttentionLayer, Decoder, Norms
from ..weights import Weights

NORMS = Norms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def layer(index: int) -> AttentionLayer:
        return AttentionLayer(weights, config, index, mlp_names=MERGED, norms=NORMS, rotation="interleaved")

    return Decoder(weights, config, context, layer)
