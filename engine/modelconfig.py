"""config.json -> ModelConfig: what a model is, typed and checked, whichever release of transformers wrote it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from .errors import ModelRefused
from .fields import Fields
from .quantization import Quantization, parse_quantization

LayerKind = Literal["full", "sliding"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of a kind of layer; the names follow the papers and config.json."""

    kind: Literal["default", "linear", "llama3", "yarn", "longrope"]
    theta: float
    rotary_dim: int  # dimensions of each head that turn, even
    factor: float = 1.0
    original_positions: int = 0  # context of the training before the extension
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn (Peng et al., 2023)
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # multiplies cos and sin: yarn, longrope
    short_factors: tuple[float, ...] = ()  # longrope (Ding et al., 2024): up to original_positions
    long_factors: tuple[float, ...] = ()  # beyond


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    activation: Activation
    tie_embeddings: bool  # the head over the vocabulary is the embedding
    qkv_bias: bool
    output_bias: bool  # of attention's output projection
    mlp_bias: bool
    layer_kinds: tuple[LayerKind, ...]  # one per layer
    window: int  # positions a sliding layer sees, its own included; 0 where there are none
    ropes: Mapping[LayerKind, Rope]  # one per kind of layer there is
    attention_scale: float
    attention_soft_cap: float  # 0: none
    logit_soft_cap: float  # 0: none
    dtype: str  # as stored, e.g. "bfloat16"; empty where config.json does not say
    bos_id: int | None
    eos_ids: tuple[int, ...]
    quantization: Quantization | None  # None: the weights are ordinary floats


@dataclass(frozen=True, slots=True)
class _Family:
    """What config.json leaves out when a model has its family's defaults."""

    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    tie: bool = False
    qkv_bias: bool | None = None  # None: as attention_bias says
    window: Literal["none", "all", "flag", "pattern"] = "none"  # which layers slide
    theta: float = 10_000.0


FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "gemma3_text": _Family(head_dim=256, tie=True, window="pattern", theta=1_000_000.0),
        "llama": _Family(),
        "mistral": _Family(window="all", qkv_bias=False),
        "phi3": _Family(window="all", qkv_bias=False),
        "qwen2": _Family(window="flag", qkv_bias=True),
        "qwen3": _Family(window="flag", head_dim=128),
    }
)

_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType({"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"})
_LAYER_KINDS: Mapping[str, LayerKind] = MappingProxyType({"full_attention": "full", "sliding_attention": "sliding"})


def parse_config(values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Raises ModelRefused naming the field that cannot be."""
    fields = Fields(values, where)
    model_type = fields.text("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        return _stranger(fields)
    if fields.flag("use_bidirectional_attention", False):
        raise ModelRefused(f"{where}: use_bidirectional_attention is not supported: it does not generate text")

    hidden, heads = fields.integer("hidden_size", 1, 2**17), fields.integer("num_attention_heads", 1, 2**10)
    kv_heads = fields.integer("num_key_value_heads", 1, 2**10, heads)
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    head_dim = fields.integer("head_dim", 2, 2**10, family.head_dim or hidden // heads)
    if head_dim < 2 or ("head_dim" not in fields and family.head_dim is None and hidden % heads):
        raise fields.refuse("hidden_size", f"a multiple of num_attention_heads ({heads})")
    vocab = fields.integer("vocab_size", 1, 2**24)
    activation = fields.text("hidden_activation" if "hidden_activation" in fields else "hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ModelRefused(f"{where}: the activation {activation!r:.50} is not one of {', '.join(_ACTIVATIONS)}")
    bias = fields.flag("attention_bias", False)
    kinds, window = _layer_kinds(fields, family)
    bos = fields.ids("bos_token_id", vocab)
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 1, 2**20),
        num_layers=len(kinds),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=fields.integer("max_position_embeddings", 1, 2**27),
        norm_eps=fields.number("rms_norm_eps", 1e-12, 1.0, 1e-6),
        activation=_ACTIVATIONS[activation],
        tie_embeddings=fields.flag("tie_word_embeddings", family.tie),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias and family.qkv_bias is None,
        mlp_bias=fields.flag("mlp_bias", False),
        layer_kinds=kinds,
        window=window,
        ropes=_ropes(fields, family, kinds, head_dim),
        attention_scale=fields.number("query_pre_attn_scalar", 1e-6, 1e9, head_dim) ** -0.5,
        attention_soft_cap=fields.number("attn_logit_softcapping", 1e-3, 1e9, 0.0),
        logit_soft_cap=fields.number("final_logit_softcapping", 1e-3, 1e9, 0.0),
        dtype=fields.text("dtype" if "dtype" in fields else "torch_dtype", ""),
        bos_id=bos[0] if bos else None,
        eos_ids=fields.ids("eos_token_id", vocab),
        quantization=parse_quantization(fields, where),
    )


def _stranger(fields: Fields) -> ModelConfig:
    """An architecture that none of our model files has, but a backend with models of its own may: what the engine
    needs to know of it, and zeros. Models that see or hear keep what they read with in text_config."""
    own = fields if "vocab_size" in fields or "text_config" not in fields else fields.table("text_config")
    vocab = own.integer("vocab_size", 1, 2**24)
    bos = fields.ids("bos_token_id", vocab)
    return ModelConfig(
        model_type=fields.text("model_type"),
        vocab_size=vocab,
        hidden_size=own.integer("hidden_size", 1, 2**17, 0),
        intermediate_size=0,
        num_layers=own.integer("num_hidden_layers", 1, 2**10, 0),
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        max_positions=own.integer("max_position_embeddings", 1, 2**27, 4096),
        norm_eps=0.0,
        activation="silu",
        tie_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        layer_kinds=(),
        window=0,
        ropes=MappingProxyType({}),
        attention_scale=0.0,
        attention_soft_cap=0.0,
        logit_soft_cap=0.0,
        dtype=own.text("dtype" if "dtype" in own else "torch_dtype", ""),
        bos_id=bos[0] if bos else None,
        eos_ids=fields.ids("eos_token_id", vocab),
        quantization=None,  # for whoever has the architecture to find out
    )


def _layer_kinds(fields: Fields, family: _Family) -> tuple[tuple[LayerKind, ...], int]:
    """Which layers slide, and the window (0 where none does)."""
    layers = fields.integer("num_hidden_layers", 1, 2**10)
    window = fields.integer("sliding_window", 1, 2**27, 0)
    kinds: list[LayerKind] = ["full"] * layers
    if family.window == "none" or not window:
        return tuple(kinds), 0
    if family.window == "flag" and not fields.flag("use_sliding_window", False):
        return tuple(kinds), 0
    if family.window == "all":
        kinds = ["sliding"] * layers
    elif "layer_types" in fields:
        named = fields.texts("layer_types")
        if len(named) != layers or not set(named) <= set(_LAYER_KINDS):
            raise fields.refuse("layer_types", f"{layers} names out of {', '.join(_LAYER_KINDS)}")
        kinds = [_LAYER_KINDS[name] for name in named]
    elif family.window == "pattern":
        pattern = fields.integer("sliding_window_pattern", 1, layers + 6, 6)
        kinds = ["sliding" if (layer + 1) % pattern else "full" for layer in range(layers)]
    else:
        first = fields.integer("max_window_layers", 0, 2**10, 28)
        kinds = ["sliding" if layer >= first else "full" for layer in range(layers)]
    return tuple(kinds), window if "sliding" in kinds else 0


def _ropes(fields: Fields, family: _Family, kinds: tuple[LayerKind, ...], head_dim: int) -> Mapping[LayerKind, Rope]:
    """transformers 5 writes rope_parameters, flat or by layer type; transformers 4 wrote rope_theta and
    rope_scaling beside each other, and Gemma 3 rope_local_base_freq, which rope_scaling does not touch."""
    written = fields.table("rope_parameters")
    nested = any(name in written for name in _LAYER_KINDS)
    by_kind: dict[LayerKind, Rope] = {}
    for name, kind in _LAYER_KINDS.items():
        if kind not in kinds:
            continue
        theta, scaling = fields.number("rope_theta", 1.0, 1e15, family.theta), fields.table("rope_scaling")
        if family.window == "pattern" and kind == "sliding":
            theta, scaling = fields.number("rope_local_base_freq", 1.0, 1e15, 10_000.0), Fields({}, "")
        if "rope_parameters" in fields:
            scaling = written.table(name) if nested else written
        by_kind[kind] = _rope(fields, scaling, theta, head_dim)
    return MappingProxyType(by_kind)


def _rope(fields: Fields, scaling: Fields, theta: float, head_dim: int) -> Rope:
    kind = scaling.text("rope_type" if "rope_type" in scaling else "type", "default")
    if fields.text("model_type") == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # what Phi-3's first files called it
    theta = scaling.number("rope_theta", 1.0, 1e15, theta)
    partial = fields.number("partial_rotary_factor", 1e-3, 1.0, 1.0)
    dim = int(head_dim * scaling.number("partial_rotary_factor", 1e-3, 1.0, partial))
    if dim < 2 or dim % 2:
        raise ModelRefused(f"config.json: rotary embedding needs an even number of dimensions per head, found {dim}")
    if kind == "default":
        return Rope("default", theta, dim)
    # Phi-3 keeps it outside rope_parameters, where it wins.
    positions = fields.integer("max_position_embeddings", 1, 2**27)
    outer = scaling.integer("original_max_position_embeddings", 1, 2**27, positions)
    original = fields.integer("original_max_position_embeddings", 1, 2**27, outer)
    if kind == "longrope":
        factor = scaling.number("factor", 1e-3, 1e6, positions / original)
        grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
        return Rope(
            "longrope",
            theta,
            dim,
            factor,
            original,
            attention_factor=scaling.number("attention_factor", 0.0, 1e6, grown),
            short_factors=scaling.numbers("short_factor", dim // 2),
            long_factors=scaling.numbers("long_factor", dim // 2),
        )
    factor = scaling.number("factor", 1e-3, 1e6)
    if kind == "linear":
        return Rope("linear", theta, dim, factor)
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor", 1e-3, 1e6), scaling.number("high_freq_factor", 1e-3, 1e6)
        if high <= low:
            raise scaling.refuse("high_freq_factor", f"more than low_freq_factor ({low:g})")
        return Rope("llama3", theta, dim, factor, original, low, high)
    if kind == "yarn":
        return Rope(
            "yarn",
            theta,
            dim,
            factor,
            original,
            beta_fast=scaling.number("beta_fast", 1e-3, 1e6, 32.0),
            beta_slow=scaling.number("beta_slow", 1e-3, 1e6, 1.0),
            truncate=scaling.flag("truncate", True),
            attention_factor=_yarn_attention_factor(scaling, factor),
        )
    raise ModelRefused(
        f"config.json: the rope type {kind!r:.50} is not supported",
        "known rope types: default, linear, llama3, yarn, longrope",
    )


def _yarn_attention_factor(scaling: Fields, factor: float) -> float:
    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    own, all_dims = scaling.number("mscale", 0.0, 1e3, 0.0), scaling.number("mscale_all_dim", 0.0, 1e3, 0.0)
    default = grown(own) / grown(all_dims) if own and all_dims else grown(1.0)
    return scaling.number("attention_factor", 0.0, 1e6, default)
