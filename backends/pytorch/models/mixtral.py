"""Mixtral: Mistral with experts in every layer. Published files have other names than those of transformers 5."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..experts import ExpertLayout, routed_mlp
from ..layers import AttentionLayer, Decoder
from ..weights import Weights

PUBLISHED = ExpertLayout(mlp="block_sparse_moe", gate="w1", up="w3", down="w2")


def layout_of(weights: Weights) -> ExpertLayout:
    """The names in published files, or those of transformers 5."""
    return ExpertLayout() if "model.layers.0.mlp.gate.weight" in weights.tensors else PUBLISHED


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    layout = layout_of(weights)

    def layer(index: int) -> AttentionLayer:
        return AttentionLayer(weights, config, index, mlp=routed_mlp(weights, config, index, layout))

    return Decoder(weights, config, context, layer)
