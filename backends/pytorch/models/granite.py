"""Granite: Llama with factors of the embeddings, of the attention scores, of the layers' outputs and of the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ....engine.files.model_config import ModelConfig
from ....kernels.ops.mlp import Mlp
from ..layers import AttentionLayer, Decoder, Layer
from ..recurrent import RecurrentLayer, mamba_mixer
from ..weights import Weights


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    return build_with(weights, config, context, lambda index: None)


def build_with(weights: Weights, config: ModelConfig, context: int, mlp: Callable[[int], Mlp | None]) -> Decoder:
    """A model whose layers have the MLPs that `mlp` returns; see AttentionLayer."""
    # The model computes the residual stream divided by residual_scale, so layers add their outputs without a factor.
    # A norm of a scaled stream is the same if its epsilon is scaled by the square.
    factor = 1.0 / config.residual_scale
    scaled = replace(config, norm_eps=config.norm_eps * factor**2)

    def layer(index: int) -> Layer:
        if index in config.state_layers:
            return RecurrentLayer(weights, scaled, index, mamba_mixer(weights, config, index), mlp=mlp(index))
        return AttentionLayer(weights, scaled, index, mlp=mlp(index))

    return Decoder(weights, scaled, context, layer, stream_scale=config.embedding_scale * factor)
