"""Granite 4: Mamba2 in most layers or in none; a dense MLP in every layer, or experts with a shared expert. It may have
no rope."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ....kernels.ops.mlp import Mlp
from ..experts import MlpNames, gated_mlp, routed_mlp
from ..layers import Decoder
from ..weights import Weights
from .granite import build_with
from .granitemoe import LAYOUT

MLP = "shared_mlp"
NAMES = MlpNames(("input_linear",), "output_linear")


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    layout = LAYOUT._replace(shared=MLP, shared_names=NAMES)

    def mlp(index: int) -> Mlp:
        experts = routed_mlp(weights, config, index, layout)
        return experts or gated_mlp(weights, config, f"model.layers.{index}.{MLP}", config.intermediate_size, NAMES)

    return build_with(weights, config, context, mlp)
