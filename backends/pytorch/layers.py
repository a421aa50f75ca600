"""The modules of decoder-only models. The files in models/ combine them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...engine.files.families import LayerKind
from ...engine.files.model_config import ModelConfig
from ...kernels.ops import Ops
from ...kernels.ops.kv import Rotation
from ...kernels.ops.layer import DecoderLayer
from ...kernels.ops.mlp import Mlp
from ...kernels.ops.step import Adapters, HeadStep, LayerStep, SampledRows
from .experts import MlpNames, gated_mlp
from .inputs import Step
from .kv import GroupedKV
from .rotary import NoRotation, QueryFactors, Rotary
from .weights import Weights


class RMSNorm:
    """Adds a vector to the residual stream and normalises the sum. `offset` is added to the norm's weight."""

    def __init__(self, weights: Weights, name: str, width: int, eps: float, offset: float = 0.0) -> None:
        self.weight = weights.take(f"{name}.weight", (width,))
        self.eps = eps
        self.offset = offset

    def add(self, x: Tensor, stream: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        """(the normalised sum, the sum) of `x` and the residual `stream`, all [tokens, width]."""
        return ops.norm.add_rms(x, stream, self.weight, self.eps, self.offset)


class CentredNorm:
    """As RMSNorm, for a layer norm without a bias."""

    def __init__(self, weights: Weights, name: str, width: int, eps: float) -> None:
        self.weight = weights.take(f"{name}.weight", (width,))
        self.eps = eps

    def add(self, x: Tensor, stream: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        """See RMSNorm.add."""
        stream = x + stream
        return ops.norm.layer(stream, self.weight, None, self.eps), stream


class Layer(Protocol):
    """The attributes of a layer that the decoder reads."""

    @property
    def kind(self) -> LayerKind: ...

    @property
    def prepared(self) -> Any:
        """The layer's weights in the form that the device's op `layer.prepare` returns."""
        ...


class LayerInputs(Protocol):
    """The inputs of their own that the layers of a model have."""

    def __call__(self, step: Step, x: Tensor, ops: Ops) -> Tensor:
        """[layers, tokens, dim] of the embedded tokens x [tokens, hidden]."""
        ...


class Norms(NamedTuple):
    """Names of a layer's norms in the model files; empty if the layer has no such norm. The defaults are Llama's
    names."""

    before_attention: str = "input_layernorm"
    before_mlp: str = "post_attention_layernorm"
    after_attention: str = ""
    after_mlp: str = ""
    centred: bool = False  # whether the norm before attention is a layer norm without a bias
    parallel: bool = False  # whether the MLP has the input of attention; see DecoderLayer


class AttentionLayer:
    """A layer with self-attention over the paged cache, rotary positions and an MLP."""

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        index: int,
        *,
        qkv: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
        out: str = "o_proj",
        mlp: Mlp | None = None,  # None: a dense MLP with the projections `mlp_names`
        mlp_names: MlpNames = MlpNames(),
        norms: Norms = Norms(),
        offset: float = 0.0,  # added to the weight of every norm
        sinks: bool = False,  # whether the attention has sinks
        rotation: Rotation = "neox",
        head_norms: tuple[str, str] = ("q_norm", "k_norm"),  # names of the norms of queries and keys
        unit_head_norms: bool = False,  # whether these norms have no weights
        joint_head_norms: bool = False,  # whether the heads are normalised together; see DecoderLayer
        rotates_first: bool = False,  # whether the heads are rotated before their norms
    ) -> None:
        name = f"model.layers.{index}"
        width = config.hidden_size
        attention = f"{name}.self_attn"
        dim = config.head_dim
        out_features = [heads * dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        inputs = [config.query_parts * out_features[0], *out_features[1:]]
        query_width, key_width = out_features[:2] if joint_head_norms else (dim, dim)

        def norm(suffix: str, size: int = width) -> Tensor | None:
            return weights.take(f"{name}.{suffix}.weight", (size,)) if suffix else None

        has_rope = not config.rope_layers or config.rope_layers[index]
        query_norm, key_norm = (f"self_attn.{name}" for name in head_norms) if config.head_norms else ("", "")
        unit = None
        if unit_head_norms:
            query_norm, key_norm = "", ""
            unit = torch.ones(dim, device=weights.device) if config.head_norms and has_rope else None
        self.kind = config.layer_kinds[index]
        self.prepared = weights.prepare(
            DecoderLayer(
                before_attention=norm(norms.before_attention),
                before_mlp=norm(norms.before_mlp),
                after_attention=norm(norms.after_attention),
                after_mlp=norm(norms.after_mlp),
                query_norm=norm(query_norm, query_width) if unit is None else unit,
                key_norm=norm(key_norm, key_width) if unit is None else unit,
                qkv=weights.linear(
                    [f"{attention}.{projection}" for projection in qkv],
                    inputs if len(qkv) == 3 else [sum(inputs)],
                    width,
                    config.qkv_bias,
                ),
                out=weights.linear([f"{attention}.{out}"], [width], out_features[0], config.output_bias),
                mlp=mlp or gated_mlp(weights, config, f"{name}.mlp", config.intermediate_size, mlp_names),
                rotation=rotation,
                dim=dim,
                eps=config.norm_eps,
                offset=offset,
                scale=config.attention_scale,
                window=config.window if self.kind == "sliding" else 0,
                soft_cap=config.attention_soft_cap,
                sinks=weights.take(f"{attention}.sinks", (config.num_heads,)).float() if sinks else None,
                joint_head_norms=joint_head_norms,
                rotates_first=rotates_first,
                centred=norms.centred,
                parallel=norms.parallel,
                output_gate=config.output_gate,
                scales_queries=not (has_rope and config.query_scaling and config.query_scaling.only_without_rope),
                cache_index=config.cache_index(index),
                rotation_index=rotation_index(config, index),
            )
        )


def rotation_index(config: ModelConfig, index: int) -> int:
    """The index of a layer's rotation in LayerStep.rotations: those of config.ropes, then NoRotation if it is used."""
    if config.rope_layers and not config.rope_layers[index]:
        return len(config.ropes)
    return list(config.ropes).index(config.layer_kinds[index])


class Decoder:
    """A decoder-only model: embedding, layers, final norm and output head. `context` is the maximum context."""

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        context: int,
        build_layer: Callable[[int], Layer],
        *,
        embedding_scale: float = 1.0,  # factor of the embeddings, rounded to their dtype
        stream_scale: float = 1.0,  # factor of the scaled embeddings, not rounded
        norm_offset: float = 0.0,
        centred: bool = False,  # whether the final norm is a layer norm
        norm: str = "model.norm",  # name of the final norm
        layer_inputs: LayerInputs | None = None,
    ) -> None:
        vocab = config.vocab_size
        hidden = config.hidden_size
        self.embedding = weights.embedding("model.embed_tokens", (vocab, hidden))
        self.embedding_lora = weights.slots.embedding("model.embed_tokens", vocab, hidden)
        self.dtype = weights.dtype
        self.layers = [build_layer(index) for index in range(config.num_layers)]
        self.stack = weights.prepare_stack([layer.prepared for layer in self.layers])
        final = norm, config.hidden_size, config.norm_eps
        self.norm = CentredNorm(weights, *final) if centred else RMSNorm(weights, *final, norm_offset)
        self.head = (
            weights.tied_head("model.embed_tokens", "lm_head", vocab, hidden)
            if config.tie_embeddings
            else weights.linear(["lm_head"], [vocab], hidden)
        )
        self._layer_inputs = layer_inputs
        self.embedding_scale = embedding_scale
        self.stream_scale = stream_scale
        self.logit_scale = config.logit_scale
        self.soft_cap = config.logit_soft_cap
        self._ropes = tuple(config.ropes.values())
        self._rotates_all = all(config.rope_layers)
        self._query_scaling = config.query_scaling
        self.query_factors: QueryFactors | None = None
        self.rotaries: list[Rotary | NoRotation] = []
        self.set_context(context)

    def set_context(self, context: int) -> None:
        """Set the maximum context. Graphs captured before this call would not see it."""
        device = self.embedding.device.type
        self.rotaries = []  # frees the tables before the new ones are allocated
        self.rotaries = [Rotary(rope, context, device) for rope in self._ropes]
        if not self._rotates_all:
            self.rotaries.append(NoRotation(self._ropes[0], device))
        scaling = self._query_scaling
        self.query_factors = None if scaling is None else QueryFactors(scaling, context, device, self.dtype)

    def __call__(self, step: Step, ops: Ops, kv: GroupedKV) -> Tensor:
        """The final hidden states [samples, hidden] of the tokens `step.last`, normalised. Keys and values of all
        tokens go to the cache."""
        rotations = [rotary.rows(step.positions) for rotary in self.rotaries]
        x = ops.linear.embedding(step.tokens, self.embedding, self.embedding_scale, self.dtype)
        if step.adapters is not None and self.embedding_lora is not None:
            adapters = step.adapters
            if self.embedding_scale != 1.0:
                adapters = adapters._replace(scales=adapters.scales * self.embedding_scale)
            ops.lora.embedding(x, step.tokens, self.embedding_lora, adapters)
        if self.stream_scale != 1.0:
            x = x * self.stream_scale
        stream = torch.zeros_like(x)
        sampled = None if step.last_rows is None else SampledRows(step.last, step.last_rows, step.sample_adapters)
        factors = None
        if self.query_factors is not None:
            factors = self.query_factors.rows(step.positions, step.rows.contexts)
        layer_step = LayerStep(
            step.rows,
            step.slots,
            rotations,
            kv.cache,
            step.adapters,
            sampled,
            step.streams,
            factors,
            step.other_places,
            step.state_rows,
            step.run_scan,
            None if self._layer_inputs is None else self._layer_inputs(step, x, ops),
        )
        x, stream = ops.layer.decoders(ops, self.stack, x, stream, layer_step)
        is_decode = step.last.shape[0] == len(step.rows.query_lens) == x.shape[0]  # one token and one sample per row
        if sampled is None and not is_decode:
            x = x.index_select(0, step.last)
            stream = stream.index_select(0, step.last)
        return self.norm.add(x, stream, ops)[0]

    def logits(self, hidden: Tensor, ops: Ops, adapters: Adapters | None = None) -> Tensor:
        """The logits [samples, vocab] float32 of hidden states [samples, hidden]. `adapters` has the adapter of each
        hidden state; None: no row has an adapter."""
        logits = self.head(hidden, ops, HeadStep(adapters), torch.float32)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return torch.tanh(logits / self.soft_cap) * self.soft_cap if self.soft_cap else logits
