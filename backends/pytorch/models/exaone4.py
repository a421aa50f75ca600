"""EXAONE 4: norms only after attention and MLP, norms of queries and keys. Between sliding layers there are full layers
without a rope (the default of ModelConfig)."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..layers import AttentionLayer, Decoder
from ..weights import Weights
from .olmo2 import NORMS


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    return Decoder(weights, config, context, lambda index: AttentionLayer(weights, config, index, norms=NORMS))
