"""GLM 4 9B: Llama with a merged gate_up weight and a partial rotary embedding of neighbouring dimensions."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..experts import MERGED
from ..layers import AttentionLayer, Decoder
from ..weights import Weights


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def layer(index: int) -> AttentionLayer:
        return AttentionLayer(weights, config, index, mlp_names=MERGED, rotation="interleaved")

    return Decoder(weights, config, context, layer)
