"""The parts of decoder-only models. A model file combines them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...engine.modelconfig import LayerKind, ModelConfig
from ...kernels.ops import Ops
from ...kernels.ops.layer import DecoderLayer
from ...kernels.ops.mlp import GatedMlp
from ...kernels.ops.step import Adapters, Answers, HeadStep, LayerStep
from .inputs import Step
from .kv import PagedKV
from .rotary import Rotary
from .weights import Weights


class RMSNorm:
    """Adds to the residual stream and normalises the sum."""

    def __init__(self, weights: Weights, name: str, width: int, eps: float, offset: float = 0.0) -> None:
        self.weight = weights.take(f"{name}.weight", (width,))
        self.eps = eps
        self.offset = offset

    def add(self, x: Tensor, stream: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        return ops.norm.add_rms(x, stream, self.weight, self.eps, self.offset)


class Layer(Protocol):
    @property
    def kind(self) -> LayerKind: ...

    @property
    def parts(self) -> Any:
        """As the device's `layer.prepare` made it."""
        ...


class Norms(NamedTuple):
    """Names of the norms of a layer in its files; before_mlp is "post_attention" in Llama's."""

    before_attention: str = "input_layernorm"
    before_mlp: str = "post_attention_layernorm"
    after_attention: str = ""  # empty: there is none
    after_mlp: str = ""


class DenseLayer:
    """Self-attention with rotary positions over the paged cache, and a gated MLP."""

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        index: int,
        *,
        qkv: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
        gate_up: Sequence[str] = ("gate_proj", "up_proj"),
        norms: Norms = Norms(),
        head_norms: bool = False,  # queries and keys are normalised
        offset: float = 0.0,  # of every norm's weight
    ) -> None:
        name = f"model.layers.{index}"
        width = config.hidden_size
        inner = config.intermediate_size
        attention = f"{name}.self_attn"
        mlp = f"{name}.mlp"
        dim = config.head_dim
        out_features = [heads * dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        sides = [2 * inner // len(gate_up)] * len(gate_up)

        def norm(part: str, size: int = width) -> Tensor | None:
            return weights.take(f"{name}.{part}.weight", (size,)) if part else None

        self.kind = config.layer_kinds[index]
        self.parts = weights.prepare(
            DecoderLayer(
                before_attention=weights.take(f"{name}.{norms.before_attention}.weight", (width,)),
                before_mlp=weights.take(f"{name}.{norms.before_mlp}.weight", (width,)),
                after_attention=norm(norms.after_attention),
                after_mlp=norm(norms.after_mlp),
                query_norm=norm("self_attn.q_norm" if head_norms else "", dim),
                key_norm=norm("self_attn.k_norm" if head_norms else "", dim),
                qkv=weights.linear(
                    [f"{attention}.{part}" for part in qkv],
                    out_features if len(qkv) == 3 else [sum(out_features)],
                    width,
                    config.qkv_bias,
                ),
                out=weights.linear([f"{attention}.o_proj"], [width], out_features[0], config.output_bias),
                mlp=GatedMlp(
                    gate_up=weights.linear([f"{mlp}.{part}" for part in gate_up], sides, width, config.mlp_bias),
                    down=weights.linear([f"{mlp}.down_proj"], [width], inner, config.mlp_bias),
                    gate="gelu_tanh_and_mul" if config.activation == "gelu_tanh" else "silu_and_mul",
                ),
                rotation="neox",
                dim=dim,
                eps=config.norm_eps,
                offset=offset,
                scale=config.attention_scale,
                window=config.window if self.kind == "sliding" else 0,
                cache_index=index,
                rotation_index=list(config.ropes).index(self.kind),
            )
        )


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
        vocab = config.vocab_size
        hidden = config.hidden_size
        self.embedding = weights.embedding("model.embed_tokens", (vocab, hidden))
        self.embedding_lora = weights.slots.embedding("model.embed_tokens", vocab, hidden)
        self.dtype = weights.dtype
        self.layers = [layer(index) for index in range(config.num_layers)]
        self.stack = weights.prepare_stack([one.parts for one in self.layers])
        self.norm = RMSNorm(weights, "model.norm", config.hidden_size, config.norm_eps, norm_offset)
        self.head = (
            weights.tied_head("model.embed_tokens", "lm_head", vocab, hidden)
            if config.tie_embeddings
            else weights.linear(["lm_head"], [vocab], hidden)
        )
        self.embedding_scale = embedding_scale
        self.soft_cap = config.logit_soft_cap
        device = self.embedding.device.type
        self.rotaries = [Rotary(rope, context, device) for rope in config.ropes.values()]

    def __call__(self, step: Step, ops: Ops, kv: PagedKV) -> Tensor:
        """Last hidden states of the tokens that `step.last` names [rows, hidden], normalised; writes the cache."""
        rotations = [rotary.rows(step.positions) for rotary in self.rotaries]
        x = ops.linear.embedding(step.tokens, self.embedding, self.embedding_scale, self.dtype)
        if step.adapters is not None and self.embedding_lora is not None:
            scaled = step.adapters._replace(scales=step.adapters.scales * self.embedding_scale)
            ops.lora.embedding(x, step.tokens, self.embedding_lora, scaled)
        stream = torch.zeros_like(x)
        answers = None if step.last_rows is None else Answers(step.last, step.last_rows)
        layer_step = LayerStep(step.rows, step.slots, rotations, kv.cache, step.adapters, answers)
        x, stream = ops.layer.decoders(ops, self.stack, x, stream, layer_step)
        every = step.last.shape[0] == len(step.rows.query_lens) == x.shape[0]  # every token is its row's last
        if answers is None and not every:
            x = x.index_select(0, step.last)
            stream = stream.index_select(0, step.last)
        return self.norm.add(x, stream, ops)[0]

    def logits(self, hidden: Tensor, ops: Ops, adapters: Adapters | None = None) -> Tensor:
        """[rows, vocab] float32. `adapters` of the rows; None: no row has one."""
        logits = self.head(hidden, ops, HeadStep(adapters), torch.float32)
        return torch.tanh(logits / self.soft_cap) * self.soft_cap if self.soft_cap else logits
