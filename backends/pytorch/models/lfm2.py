"""LFM2: short convolutions with gates in most layers, attention in the others."""

from __future__ import annotations

from ....engine.files.model_config import ModelConfig
from ..experts import ExpertLayout, MlpNames, gated_mlp, routed_mlp
from ..layers import AttentionLayer, Decoder, Layer, Norms
from ..recurrent import RecurrentLayer, conv_mixer
from ..weights import Weights

MLP = "feed_forward"
NAMES = MlpNames(("w1", "w3"), "w2")
NORMS = Norms("operator_norm", "ffn_norm")


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    return build_with(weights, config, context, ExpertLayout())


def build_with(weights: Weights, config: ModelConfig, context: int, layout: ExpertLayout) -> Decoder:
    """A model whose layers have the experts of `layout`, if config.moe has them."""

    def layer(index: int) -> Layer:
        mlp = routed_mlp(weights, config, index, layout) or gated_mlp(
            weights, config, f"model.layers.{index}.{MLP}", config.intermediate_size, NAMES
        )
        if index in config.state_layers:
            mixer = conv_mixer(weights, config, index)
            return RecurrentLayer(weights, config, index, mixer, mlp=mlp, norms=NORMS)
        head_norms = ("q_layernorm", "k_layernorm")
        return AttentionLayer(weights, config, index, mlp=mlp, out="out_proj", norms=NORMS, head_norms=head_norms)

    return Decoder(weights, config, context, layer, norm="model.embedding_norm")
