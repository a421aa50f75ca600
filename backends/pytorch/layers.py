"""The parts that decoder-only models are made of. A model file says how they are put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...engine.modelconfig import LayerKind, ModelConfig
from ...kernels.ops import Ops
from .inputs import Step
from .kv import PagedKV
from .rotary import Rotary
from .weights import Weights

Turns = Mapping[LayerKind, tuple[Tensor, Tensor]]  # cos and sin of the step's positions


class RMSNorm:
    """Normalises; with a residual stream it adds first and gives back both."""

    def __init__(self, weights: Weights, name: str, width: int, eps: float, offset: float = 0.0) -> None:
        self.weight, self.eps, self.offset = weights.take(f"{name}.weight", (width,)), eps, offset

    def __call__(self, x: Tensor, ops: Ops) -> Tensor:
        return ops.norm.rms(x, self.weight, self.eps, self.offset)

    def add(self, x: Tensor, stream: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        return ops.norm.add_rms(x, stream, self.weight, self.eps, self.offset)


class Attention:
    """Self-attention with rotary positions over the paged cache."""

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        layer: int,
        *,
        qkv: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
        head_norm: Callable[[str], RMSNorm] | None = None,  # given a weight's name; normalises queries and keys
    ) -> None:
        name = f"model.layers.{layer}.self_attn"
        dim = config.head_dim
        self.dim, self.layer, self.kind = dim, layer, config.layer_kinds[layer]
        self.scale, self.soft_cap = config.attention_scale, config.attention_soft_cap
        self.window = config.window if self.kind == "sliding" else 0
        outs = [heads * dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        self.qkv = weights.linear(
            [f"{name}.{part}" for part in qkv],
            outs if len(qkv) == 3 else [sum(outs)],
            config.hidden_size,
            config.qkv_bias,
        )
        self.out = weights.linear([f"{name}.o_proj"], [config.hidden_size], outs[0], config.output_bias)
        norms = (head_norm(f"{name}.q_norm"), head_norm(f"{name}.k_norm")) if head_norm else None
        self.query_norm: Tensor | None = norms[0].weight if norms else None
        self.key_norm: Tensor | None = norms[1].weight if norms else None
        self.eps, self.offset = (norms[0].eps, norms[0].offset) if norms else (0.0, 0.0)

    def __call__(self, x: Tensor, step: Step, turns: Turns, ops: Ops, kv: PagedKV) -> Tensor:
        qkv = self.qkv(x, ops).view(len(x), -1, self.dim)
        cos, sin = turns[self.kind]
        keys, values = kv.layer(self.layer)
        query = ops.kv.append(
            qkv, self.query_norm, self.key_norm, self.eps, self.offset, cos, sin, "neox", step.slots, keys, values
        )
        seen = ops.attention.paged(query, keys, values, step.rows, self.scale, self.window, self.soft_cap)
        return self.out(seen.flatten(1), ops)


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(
        self, weights: Weights, config: ModelConfig, layer: int, gate_up: Sequence[str] = ("gate_proj", "up_proj")
    ) -> None:
        name = f"model.layers.{layer}.mlp"
        width, inner = config.hidden_size, config.intermediate_size
        outs = [2 * inner // len(gate_up)] * len(gate_up)
        self.gate_up = weights.linear([f"{name}.{part}" for part in gate_up], outs, width, config.mlp_bias)
        self.down = weights.linear([f"{name}.down_proj"], [width], inner, config.mlp_bias)
        self.is_gelu = config.activation == "gelu_tanh"

    def __call__(self, x: Tensor, ops: Ops) -> Tensor:
        activate = ops.activation.gelu_tanh_and_mul if self.is_gelu else ops.activation.silu_and_mul
        return self.down(activate(self.gate_up(x, ops)), ops)


class Layer(Protocol):
    def __call__(
        self, x: Tensor, stream: Tensor, step: Step, turns: Turns, ops: Ops, kv: PagedKV
    ) -> tuple[Tensor, Tensor]:
        """(x, stream) -> the layer's own (x, stream); x is still to be added to the residual stream."""
        ...


class PreNormLayer:
    """Norm, attention, norm, MLP: the layer of Llama and most after it."""

    def __init__(self, weights: Weights, config: ModelConfig, layer: int, attention: Attention, mlp: GatedMLP) -> None:
        name, width, eps = f"model.layers.{layer}", config.hidden_size, config.norm_eps
        self.before_attention = RMSNorm(weights, f"{name}.input_layernorm", width, eps)
        self.before_mlp = RMSNorm(weights, f"{name}.post_attention_layernorm", width, eps)
        self.attention, self.mlp = attention, mlp

    def __call__(
        self, x: Tensor, stream: Tensor, step: Step, turns: Turns, ops: Ops, kv: PagedKV
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.before_attention.add(x, stream, ops)
        x, stream = self.before_mlp.add(self.attention(x, step, turns, ops, kv), stream, ops)
        return self.mlp(x, ops), stream


class Decoder:
    """Embedding, layers, norm and head."""

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        context: int,
        layer: Callable[[int], Layer],
        *,
        embedding_scale: float = 1.0,
        norm_offset: float = 0.0,
    ) -> None:
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embedding, self.dtype = weights.embedding("model.embed_tokens", (vocab, hidden)), weights.dtype
        self.layers = [layer(index) for index in range(config.num_layers)]
        self.norm = RMSNorm(weights, "model.norm", config.hidden_size, config.norm_eps, norm_offset)
        self.head = (
            weights.tied_head("model.embed_tokens", "lm_head", vocab, hidden)
            if config.tie_embeddings
            else weights.linear(["lm_head"], [vocab], hidden)
        )
        self.embedding_scale, self.soft_cap = embedding_scale, config.logit_soft_cap
        device = self.embedding.device.type
        self.rotaries = {kind: Rotary(rope, context, device) for kind, rope in config.ropes.items()}

    def __call__(self, step: Step, ops: Ops, kv: PagedKV) -> Tensor:
        """Last hidden states of the tokens that `step.last` names [rows, hidden], normalised; writes the cache."""
        turns = {kind: rotary.rows(step.positions) for kind, rotary in self.rotaries.items()}
        x = ops.linear.embedding(step.tokens, self.embedding, self.embedding_scale, self.dtype)
        stream = torch.zeros_like(x)
        for layer in self.layers:
            x, stream = layer(x, stream, step, turns, ops, kv)
        return self.norm.add(x.index_select(0, step.last), stream.index_select(0, step.last), ops)[0]

    def logits(self, hidden: Tensor, ops: Ops) -> Tensor:
        """[rows, vocab] float32."""
        logits = self.head(hidden, ops, torch.float32)
        return torch.tanh(logits / self.soft_cap) * self.soft_cap if self.soft_cap else logits
