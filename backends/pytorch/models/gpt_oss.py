"""gpt-oss: experts with biases and a clamped activation in every layer, attention with sinks, and a sliding window in
every second layer."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..experts import ExpertLayout, routed_mlp
from ..layers import AttentionLayer, Decoder
from ..weights import Weights

LAYOUT = ExpertLayout(router="router", biases=True, transposed=True, alternating=True)


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def layer(index: int) -> AttentionLayer:
        mlp = routed_mlp(weights, config, index, LAYOUT, gate="clamped_swiglu_and_mul")
        return AttentionLayer(weights, config, index, mlp=mlp, sinks=True)

    return Decoder(weights, config, context, layer)
