"""The text model of Qwen 3 VL with experts: Qwen 3 with experts, whose published tensors of all experts are
transposed."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..experts import ExpertLayout, routed_mlp
from ..layers import AttentionLayer, Decoder
from ..weights import Weights

LAYOUT = ExpertLayout(ordered_by_shape=True)


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def layer(index: int) -> AttentionLayer:
        return AttentionLayer(weights, config, index, mlp=routed_mlp(weights, config, index, LAYOUT))

    return Decoder(weights, config, context, layer)
