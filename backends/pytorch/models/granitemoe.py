"""Granite with experts in every layer."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..experts import ExpertLayout, routed_mlp
from ..layers import Decoder
from ..weights import Weights
from .granite import build_with

LAYOUT = ExpertLayout(mlp="block_sparse_moe", router="router.layer")


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    return build_with(weights, config, context, lambda index: routed_mlp(weights, config, index, LAYOUT))
