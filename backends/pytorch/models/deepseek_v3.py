"""DeepSeek V3 and R1: latent attention; dense first layers, then layers with a sigmoid router with groups and a
correction, experts and a shared expert."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..experts import ExpertLayout, routed_mlp
from ..latent import LatentLayer
from ..layers import Decoder
from ..weights import Weights

LAYOUT = ExpertLayout(shared="mlp.shared_experts", correction="gate.e_score_correction_bias")


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    def layer(index: int) -> LatentLayer:
        return LatentLayer(weights, config, index, routed_mlp(weights, config, index, LAYOUT))

    return Decoder(weights, config, context, layer)
