"""LFM2 with experts in all layers but the first ones. The router has sigmoid scores and a correction."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..experts import ExpertLayout
from ..layers import Decoder
from ..weights import Weights
from .lfm2 import MLP, build_with

LAYOUT = ExpertLayout(mlp=MLP, gate="w1", up="w3", down="w2", correction="expert_bias")


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    return build_with(weights, config, context, LAYOUT)
