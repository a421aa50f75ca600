"""Command R7B and A: attention and MLP in parallel behind one layer norm, and a rotary embedding of neighbouring
dimensions. Only sliding layers have a rope (the default of ModelConfig)."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..layers import AttentionLayer, Decoder, Norms
from ..weights import Weights

NORMS = Norms(before_mlp="", centred=True, parallel=True)


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def layer(index: int) -> AttentionLayer:
        return AttentionLayer(weights, config, index, norms=NORMS, rotation="interleaved")

    return Decoder(weights, config, context, layer, centred=True)
