"""Qwen3-Next: Gated DeltaNet in most layers, attention with gated outputs in the others, experts with a shared one."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..experts import routed_mlp
from ..layers import AttentionLayer, Decoder, Layer
from ..recurrent import RecurrentLayer, delta_mixer
from ..weights import Weights
from .qwen2_moe import LAYOUT

OFFSET = 1.0  # added to the weight of every norm, except the gated norm of a recurrent layer


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def layer(index: int) -> Layer:
        if index in config.state_layers:
            mixer = delta_mixer(weights, config, index)
            mlp = routed_mlp(weights, config, index, LAYOUT)
            return RecurrentLayer(weights, config, index, mixer, mlp=mlp, offset=OFFSET)
        mlp = routed_mlp(weights, config, index, LAYOUT)
        return AttentionLayer(weights, config, index, mlp=mlp, offset=OFFSET)

    return Decoder(weights, config, context, layer, norm_offset=OFFSET)
