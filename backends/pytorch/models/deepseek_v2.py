"""DeepSeek V2 and V2 Lite: latent attention; dense first layers, then layers with a softmax router, which may choose
among groups, experts and a shared expert."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..experts import ExpertLayout, routed_mlp
from ..latent import LatentLayer
from ..layers import Decoder
from ..weights import Weights

LAYOUT = ExpertLayout(shared="mlp.shared_experts")


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def layer(index: int) -> LatentLayer:
        return LatentLayer(weights, config, index, routed_mlp(weights, config, index, LAYOUT))

    return Decoder(weights, config, context, layer)
