"""config.json -> ModelConfig, validated. Reads the formats of transformers 4 and 5."""

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
    """Rotary position embedding of one kind of layer. The names are those of the papers and config.json."""

    kind: Literal["default", "linear", "llama3", "yarn", "longrope"]
    theta: float
    rotary_dim: int  # rotated dimensions per head, even
    factor: float = 1.0
    original_positions: int = 0  # context of the training before the context extension
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn (Peng et al., 2023)
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # factor of cos and sin: yarn, longrope
    short_factors: tuple[float, ...] = ()  # longrope (Ding et al., 2024), for positions up to original_positions
    long_factors: tuple[float, ...] = ()  # for positions above


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a decoder-only transformer."""

    model_type: str
    vocab_size: int  # 0: unknown (an architecture without a model file here)
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    activation: Activation
    tie_embeddings: bool  # the output head shares the weights of the embedding
    qkv_bias: bool
    output_bias: bool  # bias of the output projection of attention
    mlp_bias: bool
    layer_kinds: tuple[LayerKind, ...]  # one per layer
    window: int  # positions that a sliding layer attends to, including its own; 0: no sliding layers
    ropes: Mapping[LayerKind, Rope]  # layer kind -> rope
    attention_scale: float
    logit_soft_cap: float  # 0: none
    dtype: str  # of the weights, e.g. "bfloat16"; empty: unknown
    eos_ids: tuple[int, ...]
    quantization: Quantization | None  # None: unquantised


@dataclass(frozen=True, slots=True)
class _Family:
    """The config.json fields of an architecture, with the defaults of the config class in transformers."""

    max_positions: int
    kv_heads: int | None = None  # None: num_attention_heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    norm_eps: float = 1e-6
    activation_key: str = "hidden_act"
    activation: str = "silu"
    tie: bool = False
    qkv_bias: bool | None = None  # None: from the field attention_bias
    mlp_bias: bool = False  # True: there is an mlp_bias field
    layers: Literal["full", "windowed", "flagged", "pattern"] = "full"  # rule for sliding layers
    window: int | None = None
    layer_types: bool = True  # True: a layer_types field may override that rule
    theta: float = 10_000.0
    partial_rotary: bool = False  # True: rotary_dim may be less than head_dim
    rope_kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn", "longrope")
    original_positions: int | None = None  # default of original_max_position_embeddings; None: optional field
    query_scalar: int | None = None  # None: the attention scale uses head_dim
    logit_soft_cap: bool = False  # True: there is a final_logit_softcapping field
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
LOCAL_THETA = 10_000.0  # default rope base of sliding layers
_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType({"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"})
_LAYER_KINDS: Mapping[str, LayerKind] = MappingProxyType({"full_attention": "full", "sliding_attention": "sliding"})


def parse_config(values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Validate config.json. Raises ModelRefused with the name of the wrong field."""
    fields = Fields(values, where)
    model_type = fields.text("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        return _unknown(fields)
    if fields.flag("use_bidirectional_attention", False) or not fields.flag("is_causal", True):
        key = "use_bidirectional_attention" if "use_bidirectional_attention" in fields else "is_causal"
        raise ModelRefused(f"{where}: {key} is not supported: the model does not generate text")
    if len(fields.table("per_layer_config")):
        raise fields.refuse("per_layer_config", "empty (layers of different shapes are not supported)")

    hidden = fields.integer("hidden_size", 1, 2**17)
    heads = fields.integer("num_attention_heads", 1, 2**10)
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
        raise ModelRefused(
            f"{where}: activation {activation!r:.50} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
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
    """The ids in the field; the default of the family if the field is absent. null means that there is none."""
    absent = "eos_token_id" not in fields and not fields.null("eos_token_id")
    if absent and family.eos is not None and family.eos < vocab:
        return (family.eos,)
    return fields.ids("eos_token_id", vocab)


def _unknown(fields: Fields) -> ModelConfig:
    """The ModelConfig of an architecture without a model file here: the fields that the engine needs, otherwise zeros.

    A backend with its own models may support it, so nothing is refused here. Multimodal models have these fields in
    text_config.
    """
    inner = _readable(lambda: fields.table("text_config"), Fields({}, ""))
    text = fields if "vocab_size" in fields or not len(inner) else inner

    def integer(key: str, high: int, default: int) -> int:
        return _readable(lambda: text.integer(key, 1, high, default), default)

    vocab = integer("vocab_size", MAX_VOCAB, 0)
    return ModelConfig(
        model_type=fields.text("model_type"),
        vocab_size=vocab,
        hidden_size=integer("hidden_size", 2**17, 0),
        intermediate_size=0,
        num_layers=integer("num_hidden_layers", 2**10, 0),
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        max_positions=integer("max_position_embeddings", 2**27, 4096),
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
        dtype=_readable(lambda: text.text("dtype" if "dtype" in text else "torch_dtype", ""), ""),
        eos_ids=_readable(lambda: fields.ids("eos_token_id", vocab), ()),
        quantization=None,  # the backend with the architecture reads it
    )


def _readable(read: Callable[[], T], default: T) -> T:
    try:
        return read()
    except ModelRefused:
        return default


def _layer_kinds(fields: Fields, family: _Family) -> tuple[tuple[LayerKind, ...], int]:
    """(kind of each layer, window; 0 without sliding layers)"""
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
            raise fields.refuse("layer_types", f"{layers} names from {', '.join(_LAYER_KINDS)}")
        listed = [_LAYER_KINDS[name] for name in named]
        if listed != kinds and not family.layer_types:
            raise fields.refuse("layer_types", f"{kinds[0]}_attention for every layer (this architecture has one kind)")
        kinds = listed
    if "sliding" in kinds and not window and "sliding_window" in fields:
        raise fields.refuse("use_sliding_window", "true, because there are sliding layers")
    if "sliding" in kinds and not window:
        raise fields.refuse("sliding_window", "an integer, because there are sliding layers")
    return tuple(kinds), window if "sliding" in kinds else 0


def _ropes(
    fields: Fields, family: _Family, kinds: tuple[LayerKind, ...], head_dim: int, positions: int
) -> Mapping[LayerKind, Rope]:
    """The rope of each kind of layer.

    transformers 5 writes rope_parameters, by layer type if they differ. transformers 4 wrote rope_theta and
    rope_scaling; for Gemma 3 also rope_local_base_freq, to which rope_scaling does not apply.
    """
    written = fields.table("rope_parameters")
    old = fields.table("rope_scaling")
    theta = fields.number("rope_theta", 1.0, 1e15, family.theta)
    if family.layers != "pattern":
        scaling = old if len(old) else written
        if nested := [name for name in _LAYER_KINDS if name in scaling]:
            raise scaling.refuse(nested[0], "absent (this architecture has one rope for all layers)")
        rope = _rope(fields, family, scaling, theta, head_dim, positions)
        return MappingProxyType({kind: rope for kind in _LAYER_KINDS.values() if kind in kinds})
    if stray := [name for name in written if name not in _LAYER_KINDS]:
        raise written.refuse(stray[0], f"inside one of {', '.join(_LAYER_KINDS)}")
    if "type" in old and "rope_type" not in old:
        raise old.refuse(
            "type", "renamed to rope_type (releases of transformers disagree on `type` for this architecture)"
        )
    by_kind: dict[LayerKind, Rope] = {}
    for name, kind in _LAYER_KINDS.items():
        if kind in kinds:
            base = theta if kind == "full" else fields.number("rope_local_base_freq", 1.0, 1e15, LOCAL_THETA)
            scaling = written.table(name).updated(old) if kind == "full" else written.table(name)
            if not scaling.flag("truncate", True):
                raise scaling.refuse("truncate", "true (transformers supports no other value for this architecture)")
            by_kind[kind] = _rope(fields, family, scaling, base, head_dim, positions)
    return MappingProxyType(by_kind)


def _rope(fields: Fields, family: _Family, scaling: Fields, theta: float, head_dim: int, positions: int) -> Rope:
    kind = scaling.text("rope_type" if "rope_type" in scaling else "type", "default")
    if family.original_positions and kind in ("su", "yarn"):
        kind = "longrope"  # the old name in Phi-3 files
    if kind not in family.rope_kinds:
        raise ModelRefused(
            f"config.json: rope type {kind!r:.50} is not supported",
            f"supported: {', '.join(family.rope_kinds)}",
        )
    theta = scaling.number("rope_theta", 1.0, 1e15, theta)
    dim = _rotary_dim(fields, family, scaling, kind, head_dim)
    if kind == "default":
        return Rope("default", theta, dim)
    original = scaling.integer("original_max_position_embeddings", 1, 2**27, positions)
    if family.layers != "pattern":  # this field overrides rope_parameters; Phi-3 always has it
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
        low = scaling.number("low_freq_factor", 1e-3, 1e6)
        high = scaling.number("high_freq_factor", 1e-3, 1e6)
        if high <= low:
            raise scaling.refuse("high_freq_factor", f"greater than low_freq_factor ({low:g})")
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
    """The rotated dimensions of a head.

    Most architectures in transformers have partial_rotary_factor only by accident: the default rope type ignores it,
    and their attention fails with a scaled rope type.
    """
    dim = head_dim
    if family.partial_rotary or kind != "default":
        partial = fields.number("partial_rotary_factor", 1e-3, 1.0, 1.0)
        dim = int(head_dim * scaling.number("partial_rotary_factor", 1e-3, 1.0, partial))
    if dim != head_dim and not family.partial_rotary:
        where = scaling if "partial_rotary_factor" in scaling else fields
        raise where.refuse("partial_rotary_factor", f"1 (rope type {kind} of this architecture)")
    if dim < 2 or dim % 2:
        raise ModelRefused(f"config.json: the rotary dimensions per head must be an even number, not {dim}")
    return dim


def _yarn_attention_factor(scaling: Fields, factor: float) -> float:
    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale = scaling.number("mscale", 0.0, 1e3, 0.0)
    all_dims = scaling.number("mscale_all_dim", 0.0, 1e3, 0.0)
    default = grown(mscale) / grown(all_dims) if mscale and all_dims else grown(1.0)
    return scaling.number("attention_factor", 0.0, 1e6, default)
