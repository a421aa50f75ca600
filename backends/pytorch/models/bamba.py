"""Bamba: Mamba2 in most layers, attention with a partial rotary embedding in the others."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..experts import gated_mlp
from ..layers import AttentionLayer, Decoder, Layer, Norms
from ..recurrent import RecurrentLayer, mamba_mixer
from ..weights import Weights

NORMS = Norms(before_mlp="pre_ff_layernorm")


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def layer(index: int) -> Layer:
        mlp = gated_mlp(weights, config, f"model.layers.{index}.feed_forward", config.intermediate_size)
        if index in config.state_layers:
            mixer = mamba_mixer(weights, config, index)
            return RecurrentLayer(weights, config, index, mixer, mlp=mlp, norms=NORMS)
        return AttentionLayer(weights, config, index, mlp=mlp, norms=NORMS)

    return Decoder(weights, config, context, layer, norm="model.final_layernorm")
