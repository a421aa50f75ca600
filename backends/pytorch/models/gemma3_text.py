"""Gemma 3, text only: norms before and after each block, their weights stored less 1; layers of two kinds."""

from __future__ import annotations

from torch import Tensor

from ....engine.modelconfig import ModelConfig
from ....kernels.ops import Ops
from ..inputs import Step
from ..kv import PagedKV
from ..layers import Attention, Decoder, GatedMLP, RMSNorm, Turns
from ..weights import Weights

OFFSET = 1.0


class GemmaLayer:
    """Each block's answer is normalised too, before it joins the residual stream."""

    def __init__(self, weights: Weights, config: ModelConfig, layer: int) -> None:
        def norm(name: str, width: int = config.hidden_size) -> RMSNorm:
            return RMSNorm(weights, name, width, config.norm_eps, OFFSET)

        name = f"model.layers.{layer}"
        self.before_attention = norm(f"{name}.input_layernorm")
        self.after_attention = norm(f"{name}.post_attention_layernorm")
        self.before_mlp = norm(f"{name}.pre_feedforward_layernorm")
        self.after_mlp = norm(f"{name}.post_feedforward_layernorm")
        self.attention = Attention(weights, config, layer, head_norm=lambda name: norm(name, config.head_dim))
        self.mlp = GatedMLP(weights, config, layer)

    def __call__(
        self, x: Tensor, stream: Tensor, step: Step, turns: Turns, ops: Ops, kv: PagedKV
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.before_attention.add(x, stream, ops)
        x = self.after_attention(self.attention(x, step, turns, ops, kv), ops)
        x, stream = self.before_mlp.add(x, stream, ops)
        return self.after_mlp(self.mlp(x, ops), ops), stream


def build(weights: Weights, config: ModelConfig, context: int) -> Decoder:
    return Decoder(
        weights,
        config,
        context,
        lambda index: GemmaLayer(weights, config, index),
        embedding_scale=config.hidden_size**0.5,
        norm_offset=OFFSET,
    )
