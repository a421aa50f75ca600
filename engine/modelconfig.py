"""config.json -> ModelConfig: what a model is, typed and checked, whichever release of transformers wrote it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from .errors import ModelRefused
from .fields import Fields
from .quantization import Quantization, parse_quantization

T = TypeVar("T")
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
    vocab_size: int  # 0: unknown, of an architecture that none of our model files has
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
    logit_soft_cap: float  # 0: none
    dtype: str  # as stored, e.g. "bfloat16"; empty where config.json does not say
    eos_ids: tuple[int, ...]
    quantization: Quantization | None  # None: the weights are ordinary floats


@dataclass(frozen=True, slots=True)
class _Family:
    """Which fields of config.json an architecture has, and their defaults: those of transformers' config class."""

    max_positions: int
    kv_heads: int | None = None  # None: as many as num_attention_heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    norm_eps: float = 1e-6
    activation_key: str = "hidden_act"
    activation: str = "silu"
    tie: bool = False
    qkv_bias: bool | None = None  # None: attention_bias says so
    mlp_bias: bool = False  # whether there is an mlp_bias field
    layers: Literal["full", "windowed", "flagged", "pattern"] = "full"  # the rule for sliding layers
    window: int | None = None
    layer_types: bool = True  # whether a layer_types field may differ from that rule
    theta: float = 10_000.0
    partial_rotary: bool = False  # whether rotary dimensions may be fewer than head_dim
    rope_kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn", "longrope")
    original_positions: int | None = None  # of a field beside rope_parameters; None: the field is optional
    query_scalar: int | None = None  # None: attention is scaled by head_dim
    logit_soft_cap: bool = False  # whether there is a final_logit_softcapping field
    eos: int | None = None


FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "gemma3_text": _Family(
            max_positions=131_072,
            kv_heads=4,
            head_dim=256,
            activation_key="hidden_activation",
            activation="gelu_pytorch_tanh",
            tie=True,
            layers="pattern",
            window=4096,
            theta=1_000_000.0,
            query_scalar=256,
            logit_soft_cap=True,
            eos=1,
        ),
        "llama": _Family(max_positions=2048, mlp_bias=True, layer_types=False, eos=2),
        "mistral": _Family(max_positions=131_072, kv_heads=8, qkv_bias=False, layers="windowed", window=4096, eos=2),
        "phi3": _Family(
            max_positions=4096,
            norm_eps=1e-5,
            qkv_bias=False,
            layers="windowed",
            layer_types=False,
            partial_rotary=True,
            rope_kinds=("default", "longrope"),
            original_positions=4096,
            eos=32_000,
        ),
        "qwen2": _Family(max_positions=32_768, kv_heads=32, qkv_bias=True, layers="flagged", window=4096),
        "qwen3": _Family(max_positions=32_768, kv_heads=32, head_dim=128, layers="flagged", window=4096),
    }
)

MAX_VOCAB = 2**24
LOCAL_THETA = 10_000.0  # of sliding layers with a base of their own
_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType({"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"})
_LAYER_KINDS: Mapping[str, LayerKind] = MappingProxyType({"full_attention": "full", "sliding_attention": "sliding"})


def parse_config(values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Raises ModelRefused naming the field that cannot be."""
    fields = Fields(values, where)
    model_type = fields.text("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        return _stranger(fields)
    if fields.flag("use_bidirectional_attention", False) or not fields.flag("is_causal", True):
        key = "use_bidirectional_attention" if "use_bidirectional_attention" in fields else "is_causal"
        raise ModelRefused(f"{where}: {key} is not supported: it does not generate text")
    if len(fields.table("per_layer_config")):
        raise fields.refuse("per_layer_config", "empty: layers of different shapes are not supported")

    hidden, heads = fields.integer("hidden_size", 1, 2**17), fields.integer("num_attention_heads", 1, 2**10)
    kv_heads = heads if fields.null("num_key_value_heads") else family.kv_heads or heads
    kv_heads = fields.integer("num_key_value_heads", 1, 2**10, kv_heads)
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    head_dim = fields.integer("head_dim", 2, 2**10, family.head_dim or hidden // heads)
    if head_dim < 2 or ("head_dim" not in fields and family.head_dim is None and hidden % heads):
        raise fields.refuse("hidden_size", f"a multiple of num_attention_heads ({heads})")
    vocab = fields.integer("vocab_size", 1, MAX_VOCAB)
    activation = fields.text(family.activation_key, family.activation)
    if activation not in _ACTIVATIONS:
        raise ModelRefused(f"{where}: the activation {activation!r:.50} is not one of {', '.join(_ACTIVATIONS)}")
    bias = fields.flag("attention_bias", False) if family.qkv_bias is None else False
    positions = fields.integer("max_position_embeddings", 1, 2**27, family.max_positions)
    kinds, window = _layer_kinds(fields, family)
    scalar = float(head_dim)
    if family.query_scalar is not None:
        scalar = fields.number("query_pre_attn_scalar", 1e-6, 1e9, family.query_scalar)
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 1, 2**20),
        num_layers=len(kinds),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=positions,
        norm_eps=fields.number("rms_norm_eps", 1e-12, 1.0, family.norm_eps),
        activation=_ACTIVATIONS[activation],
        tie_embeddings=fields.flag("tie_word_embeddings", family.tie),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False) if family.mlp_bias else False,
        layer_kinds=kinds,
        window=window,
        ropes=_ropes(fields, family, kinds, head_dim, positions),
        attention_scale=scalar**-0.5,
        logit_soft_cap=fields.number("final_logit_softcapping", 1e-3, 1e9, 0.0) if family.logit_soft_cap else 0.0,
        dtype=fields.text("dtype" if "dtype" in fields else "torch_dtype", ""),
        eos_ids=_eos_ids(fields, family, vocab),
        quantization=parse_quantization(fields, where),
    )


def _eos_ids(fields: Fields, family: _Family, vocab: int) -> tuple[int, ...]:
    """The family's default only where the field is absent: null says that there is none."""
    absent = "eos_token_id" not in fields and not fields.null("eos_token_id")
    if absent and family.eos is not None and family.eos < vocab:
        return (family.eos,)
    return fields.ids("eos_token_id", vocab)


def _stranger(fields: Fields) -> ModelConfig:
    """An architecture that none of our model files has, but a backend with models of its own may: what the engine
    needs to know of it, and zeros. Nothing is refused: the architecture is the reason that people need to read.
    Models that see or hear keep what they read with in text_config."""
    inner = _readable(lambda: fields.table("text_config"), Fields({}, ""))
    own = fields if "vocab_size" in fields or not len(inner) else inner

    def whole(key: str, high: int, default: int) -> int:
        return _readable(lambda: own.integer(key, 1, high, default), default)

    vocab = whole("vocab_size", MAX_VOCAB, 0)
    return ModelConfig(
        model_type=fields.text("model_type"),
        vocab_size=vocab,
        hidden_size=whole("hidden_size", 2**17, 0),
        intermediate_size=0,
        num_layers=whole("num_hidden_layers", 2**10, 0),
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        max_positions=whole("max_position_embeddings", 2**27, 4096),
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
        logit_soft_cap=0.0,
        dtype=_readable(lambda: own.text("dtype" if "dtype" in own else "torch_dtype", ""), ""),
        eos_ids=_readable(lambda: fields.ids("eos_token_id", vocab), ()),
        quantization=None,  # for whoever has the architecture to find out
    )


def _readable(read: Callable[[], T], default: T) -> T:
    try:
        return read()
    except ModelRefused:
        return default


def _layer_kinds(fields: Fields, family: _Family) -> tuple[tuple[LayerKind, ...], int]:
    """Which layers slide, and the window (0 where none does)."""
    layers = fields.integer("num_hidden_layers", 1, 2**10)
    default = 0 if family.layers == "full" or fields.null("sliding_window") else family.window or 0
    window = fields.integer("sliding_window", 1, 2**27, default) if family.layers != "full" else 0
    if family.layers == "flagged" and not fields.flag("use_sliding_window", False):
        window = 0
    kinds: list[LayerKind] = ["sliding" if window else "full"] * layers
    if family.layers == "pattern":
        pattern = fields.integer("sliding_window_pattern", 1, layers + 6, 6)
        kinds = ["sliding" if (layer + 1) % pattern else "full" for layer in range(layers)]
    elif family.layers == "flagged" and window:
        first = fields.integer("max_window_layers", 0, 2**10, 28)
        kinds = ["sliding" if layer >= first else "full" for layer in range(layers)]
    if "layer_types" in fields:
        named = fields.texts("layer_types")
        if len(named) != layers or not set(named) <= set(_LAYER_KINDS):
            raise fields.refuse("layer_types", f"{layers} names out of {', '.join(_LAYER_KINDS)}")
        listed = [_LAYER_KINDS[name] for name in named]
        if listed != kinds and not family.layer_types:
            raise fields.refuse("layer_types", f"{kinds[0]}_attention for every layer: this architecture has one kind")
        kinds = listed
    if "sliding" in kinds and not window and "sliding_window" in fields:
        raise fields.refuse("use_sliding_window", "true: there are sliding layers")
    if "sliding" in kinds and not window:
        raise fields.refuse("sliding_window", "a whole number: there are sliding layers")
    return tuple(kinds), window if "sliding" in kinds else 0


def _ropes(
    fields: Fields, family: _Family, kinds: tuple[LayerKind, ...], head_dim: int, positions: int
) -> Mapping[LayerKind, Rope]:
    """transformers 5 writes rope_parameters, by layer type where these differ; transformers 4 wrote rope_theta and
    rope_scaling beside each other, and Gemma 3 rope_local_base_freq, which rope_scaling does not touch."""
    written, old = fields.table("rope_parameters"), fields.table("rope_scaling")
    theta = fields.number("rope_theta", 1.0, 1e15, family.theta)
    if family.layers != "pattern":
        scaling = old if len(old) else written
        if nested := [name for name in _LAYER_KINDS if name in scaling]:
            raise scaling.refuse(nested[0], "absent: this architecture has one rotary embedding for all layers")
        rope = _rope(fields, family, scaling, theta, head_dim, positions)
        return MappingProxyType({kind: rope for kind in _LAYER_KINDS.values() if kind in kinds})
    if stray := [name for name in written if name not in _LAYER_KINDS]:
        raise written.refuse(stray[0], f"inside one of {', '.join(_LAYER_KINDS)}")
    if "type" in old and "rope_type" not in old:
        raise old.refuse("type", "spelled rope_type: releases of transformers disagree about this architecture's type")
    by_kind: dict[LayerKind, Rope] = {}
    for name, kind in _LAYER_KINDS.items():
        if kind in kinds:
            base = theta if kind == "full" else fields.number("rope_local_base_freq", 1.0, 1e15, LOCAL_THETA)
            scaling = written.table(name).updated(old) if kind == "full" else written.table(name)
            if not scaling.flag("truncate", True):
                raise scaling.refuse("truncate", "true: transformers reads no other value for this architecture")
            by_kind[kind] = _rope(fields, family, scaling, base, head_dim, positions)
    return MappingProxyType(by_kind)


def _rope(fields: Fields, family: _Family, scaling: Fields, theta: float, head_dim: int, positions: int) -> Rope:
    kind = scaling.text("rope_type" if "rope_type" in scaling else "type", "default")
    if family.original_positions and kind in ("su", "yarn"):
        kind = "longrope"  # the name in Phi-3's first files
    if kind not in family.rope_kinds:
        raise ModelRefused(
            f"config.json: the rope type {kind!r:.50} is not supported",
            f"known rope types: {', '.join(family.rope_kinds)}",
        )
    theta = scaling.number("rope_theta", 1.0, 1e15, theta)
    dim = _rotary_dim(fields, family, scaling, kind, head_dim)
    if kind == "default":
        return Rope("default", theta, dim)
    original = scaling.integer("original_max_position_embeddings", 1, 2**27, positions)
    if family.layers != "pattern":  # the field beside rope_parameters wins, and Phi-3 always has it
        outer = family.original_positions or original
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


def _rotary_dim(fields: Fields, family: _Family, scaling: Fields, kind: str, head_dim: int) -> int:
    """Rotated dimensions of a head. Most architectures of transformers have partial_rotary_factor only by accident:
    the default type passes over it, and with a scaled type their attention does not fit together."""
    dim = head_dim
    if family.partial_rotary or kind != "default":
        partial = fields.number("partial_rotary_factor", 1e-3, 1.0, 1.0)
        dim = int(head_dim * scaling.number("partial_rotary_factor", 1e-3, 1.0, partial))
    if dim != head_dim and not family.partial_rotary:
        where = scaling if "partial_rotary_factor" in scaling else fields
        raise where.refuse("partial_rotary_factor", f"1 with the rope type {kind} of this architecture")
    if dim < 2 or dim % 2:
        raise ModelRefused(f"config.json: rotary embedding needs an even number of dimensions per head, found {dim}")
    return dim


def _yarn_attention_factor(scaling: Fields, factor: float) -> float:
    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    own, all_dims = scaling.number("mscale", 0.0, 1e3, 0.0), scaling.number("mscale_all_dim", 0.0, 1e3, 0.0)
    default = grown(own) / grown(all_dims) if own and all_dims else grown(1.0)
    return scaling.number("attention_factor", 0.0, 1e6, default)
