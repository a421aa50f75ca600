"""config.json -> ModelConfig, validated. Reads the formats of transformers 4 and 5."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from . import moeconfig
from .errors import ModelRefused
from .fields import Fields
from .moeconfig import MoeConfig, MoeFamily, parse_moe
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
    original_positions: int = 0  # context length of the original training, before the context was extended
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn (Peng et al., 2023)
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # yarn, longrope: factor that multiplies cos and sin
    short_factors: tuple[float, ...] = ()  # longrope (Ding et al., 2024), for positions up to original_positions
    long_factors: tuple[float, ...] = ()  # longrope, for positions above original_positions


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a decoder-only transformer."""

    model_type: str
    vocab_size: int  # 0: unknown (an architecture that is not in FAMILIES)
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
    head_norms: bool  # whether each head of queries and keys is normalised
    mlp_bias: bool
    layer_kinds: tuple[LayerKind, ...]  # the kind of each layer
    window: int  # positions that a sliding layer attends to, including its own; 0: no sliding layers
    ropes: Mapping[LayerKind, Rope]  # layer kind -> rope
    attention_scale: float
    logit_soft_cap: float  # 0: no soft cap
    attention_soft_cap: float  # 0: no soft cap
    dtype: str  # dtype of the weights, e.g. "bfloat16"; empty: unknown
    eos_ids: tuple[int, ...]
    quantization: Quantization | None  # None: unquantised
    moe: MoeConfig | None = None  # None: all layers have a dense MLP


# A backend that reads the files of a model itself needs few of the fields. The others stay empty.
EMPTY_CONFIG = ModelConfig(
    model_type="",
    vocab_size=0,
    hidden_size=0,
    intermediate_size=0,
    num_layers=0,
    num_heads=0,
    num_kv_heads=0,
    head_dim=0,
    max_positions=0,
    norm_eps=0.0,
    activation="silu",
    tie_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    head_norms=False,
    mlp_bias=False,
    layer_kinds=(),
    window=0,
    ropes=MappingProxyType({}),
    attention_scale=0.0,
    logit_soft_cap=0.0,
    attention_soft_cap=0.0,
    dtype="",
    eos_ids=(),
    quantization=None,
)


@dataclass(frozen=True, slots=True)
class _Family:
    """The config.json fields of an architecture, with the defaults of the config class in transformers."""

    max_positions: int
    optional: tuple[str, ...] = ()  # the fields of OPTIONAL that this architecture reads
    kv_heads: int = 0  # default of num_key_value_heads; 0: num_attention_heads
    head_dim: int = 0  # default of head_dim; 0: hidden_size / num_attention_heads
    norm_eps: float = 1e-6
    activation_key: str = "hidden_act"
    activation: str = "silu"
    tie: bool = False
    attention_bias: bool = False  # default of this field
    # Default of the field qkv_bias; the field attention_bias may add this bias.
    qkv_bias: bool = False
    output_bias: bool = True  # whether attention_bias also adds the bias of the output projection
    head_norms: bool = False  # default of use_qk_norm
    pattern: bool = False  # True: every sliding_window_pattern-th layer is full, and each layer kind has its own rope
    alternating: bool = False  # True: without `pattern`, every second layer is sliding, from the first layer on
    window: int = 0
    windowed: bool = True  # default of use_sliding_window
    # Default of max_window_layers. With `alternating`: the index from which no layer is sliding; 0: no such index.
    # Without `pattern` and `alternating`: the index of the first sliding layer.
    window_layers: int = 0
    layer_types: bool = True  # whether a layer_types field may override these defaults
    theta: float = 10_000.0
    partial_rotary: bool = False  # whether rotary_dim may be less than head_dim
    rope: Mapping[str, Any] | None = None  # default of rope_parameters, without its rope_theta
    rotary_share: float = 1.0  # default of partial_rotary_factor
    rope_kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn", "longrope")
    longrope_names: tuple[str, ...] = ()  # older names of longrope in files of this architecture
    original_positions: int = 0  # default of original_max_position_embeddings; 0: no default
    query_scalar: int = 0  # default of query_pre_attn_scalar; 0: equal to head_dim
    logit_soft_cap: float = 0.0  # default of final_logit_softcapping
    attention_soft_cap: float = 0.0  # default of attn_logit_softcapping
    eos: tuple[int, ...] = ()
    moe: MoeFamily | None = None  # None: the architecture has no experts


# Only the architectures that list these fields in `optional` read them; the others ignore any value.
OPTIONAL = frozenset(
    {
        "attention_bias",
        "mlp_bias",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "query_pre_attn_scalar",
        "final_logit_softcapping",
        "attn_logit_softcapping",
        "qkv_bias",
        "use_qk_norm",
        *moeconfig.OPTIONAL,
    }
)
_QWEN_WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers")

FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "gemma2": _Family(
            max_positions=8192,
            optional=(
                "attention_bias",
                "sliding_window",
                "query_pre_attn_scalar",
                "final_logit_softcapping",
                "attn_logit_softcapping",
            ),
            kv_heads=4,
            head_dim=256,
            activation_key="hidden_activation",
            activation="gelu_pytorch_tanh",
            tie=True,
            alternating=True,
            window=4096,
            query_scalar=256,
            logit_soft_cap=30.0,
            attention_soft_cap=50.0,
            eos=(1,),
        ),
        "gemma3_text": _Family(
            max_positions=131_072,
            optional=("attention_bias", "sliding_window", "query_pre_attn_scalar", "final_logit_softcapping"),
            kv_heads=4,
            head_dim=256,
            activation_key="hidden_activation",
            activation="gelu_pytorch_tanh",
            tie=True,
            head_norms=True,
            pattern=True,
            window=4096,
            theta=1_000_000.0,
            query_scalar=256,
            eos=(1,),
        ),
        "glm4_moe": _Family(
            max_positions=131_072,
            optional=("attention_bias", "use_qk_norm", *moeconfig.GROUPED),
            kv_heads=8,
            norm_eps=1e-5,
            output_bias=False,
            layer_types=False,
            partial_rotary=True,
            rotary_share=0.5,
            moe=MoeFamily(
                ("n_routed_experts", "num_local_experts"),
                experts=128,
                top_k=8,
                inner=1408,
                score="sigmoid",
                renormalise=True,
                shared_experts=1,
                dense_layers=1,
                group_score="top2",
            ),
        ),
        "gpt_oss": _Family(
            max_positions=131_072,
            optional=("attention_bias", "sliding_window", *moeconfig.CLAMPED),
            kv_heads=8,
            head_dim=64,
            norm_eps=1e-5,
            attention_bias=True,
            alternating=True,
            window=128,
            theta=150_000.0,
            rope=MappingProxyType(
                {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                }
            ),
            moe=MoeFamily(
                ("num_local_experts", "num_experts"),
                experts=128,
                top_k=4,
                inner_name="intermediate_size",
                renormalise=True,
            ),
        ),
        "llama": _Family(max_positions=2048, optional=("attention_bias", "mlp_bias"), layer_types=False, eos=(2,)),
        "mistral": _Family(max_positions=131_072, optional=("sliding_window",), kv_heads=8, window=4096, eos=(2,)),
        "mixtral": _Family(
            max_positions=131_072,
            optional=("sliding_window",),
            kv_heads=8,
            norm_eps=1e-5,
            layer_types=False,
            theta=1_000_000.0,
            eos=(2,),
            moe=MoeFamily(
                ("num_local_experts", "num_experts"),
                experts=8,
                top_k=2,
                inner_name="intermediate_size",
                renormalise=True,
            ),
        ),
        "phi3": _Family(
            max_positions=4096,
            optional=("sliding_window",),
            norm_eps=1e-5,
            layer_types=False,
            partial_rotary=True,
            rope_kinds=("default", "longrope"),
            longrope_names=("su", "yarn"),
            original_positions=4096,
            eos=(32_000,),
        ),
        "qwen2": _Family(
            max_positions=32_768,
            optional=_QWEN_WINDOW,
            kv_heads=32,
            qkv_bias=True,
            window=4096,
            windowed=False,
            window_layers=28,
        ),
        "qwen2_moe": _Family(
            max_positions=32_768,
            optional=(*_QWEN_WINDOW, "qkv_bias", *moeconfig.QWEN, "shared_expert_intermediate_size"),
            kv_heads=16,
            qkv_bias=True,
            alternating=True,
            window=4096,
            windowed=False,
            window_layers=28,
            moe=MoeFamily(("num_experts",), experts=60, top_k=4, inner=1408, shared_inner=5632),
        ),
        "qwen3": _Family(
            max_positions=32_768,
            optional=("attention_bias", *_QWEN_WINDOW),
            kv_heads=32,
            head_dim=128,
            head_norms=True,
            window=4096,
            windowed=False,
            window_layers=28,
        ),
        "qwen3_moe": _Family(
            max_positions=32_768,
            optional=("attention_bias", "sliding_window", "use_sliding_window", *moeconfig.QWEN),
            kv_heads=4,
            head_norms=True,
            window=4096,
            windowed=False,
            layer_types=False,
            moe=MoeFamily(("num_experts", "num_local_experts"), experts=128, top_k=8, inner=768),
        ),
    }
)

MAX_VOCAB = 2**24
LOCAL_THETA = 10_000.0  # default rope base of sliding layers
_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType({"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"})
_FULL: LayerKind = "full"
_SLIDING: LayerKind = "sliding"
_LAYER_KINDS: Mapping[str, LayerKind] = MappingProxyType({"full_attention": _FULL, "sliding_attention": _SLIDING})
_KIND_NAMES = ", ".join(_LAYER_KINDS)


def parse_config(values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Validate config.json. Raises ModelRefused with the name of the wrong field."""
    model_type = Fields(values, where).text("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        return _unknown(Fields(values, where))
    fields = Fields(values, where, ignored=OPTIONAL.difference(family.optional))
    _refuse_other_models(fields, where)
    hidden = fields.integer("hidden_size", 1, 2**17)
    heads = fields.integer("num_attention_heads", 1, 2**10)
    head_dim = _head_dim(fields, family, hidden, heads)
    vocab = fields.integer("vocab_size", 1, MAX_VOCAB)
    bias = fields.flag("attention_bias", family.attention_bias)
    positions = fields.integer("max_position_embeddings", 1, 2**27, family.max_positions)
    kinds, window = _layer_kinds(fields, family)
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 1, 2**20),
        num_layers=len(kinds),
        num_heads=heads,
        num_kv_heads=_kv_heads(fields, family, heads),
        head_dim=head_dim,
        max_positions=positions,
        norm_eps=fields.number("rms_norm_eps", 1e-12, 1.0, family.norm_eps),
        activation=_activation(fields, family, where),
        tie_embeddings=fields.flag("tie_word_embeddings", family.tie),
        qkv_bias=fields.flag("qkv_bias", family.qkv_bias) or bias,
        output_bias=bias and family.output_bias,
        head_norms=fields.flag("use_qk_norm", family.head_norms),
        mlp_bias=fields.flag("mlp_bias", False),
        layer_kinds=kinds,
        window=window,
        ropes=_ropes(fields, family, kinds, head_dim, positions),
        attention_scale=fields.number("query_pre_attn_scalar", 1e-6, 1e9, family.query_scalar or head_dim) ** -0.5,
        logit_soft_cap=_soft_cap(fields, "final_logit_softcapping", family.logit_soft_cap),
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", family.attention_soft_cap),
        dtype=fields.text(fields.either("dtype", "torch_dtype"), ""),
        eos_ids=_eos_ids(fields, family, vocab),
        quantization=parse_quantization(fields, where),
        moe=None if family.moe is None else parse_moe(fields, family.moe, len(kinds)),
    )


def _refuse_other_models(fields: Fields, where: str) -> None:
    """Refuse a model of a supported architecture if its config.json makes it anything but a plain decoder."""
    for key, supported in (("use_bidirectional_attention", False), ("is_causal", True)):
        if fields.flag(key, supported) != supported:
            raise ModelRefused(f"{where}: {key} is not supported: the model does not generate text")
    if len(fields.table("per_layer_config")):
        raise fields.refuse("per_layer_config", "empty (layers of different shapes are not supported)")


def _kv_heads(fields: Fields, family: _Family, heads: int) -> int:
    default = family.kv_heads or heads
    if fields.null("num_key_value_heads"):
        default = heads
    kv_heads = fields.integer("num_key_value_heads", 1, 2**10, default)
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    return kv_heads


def _head_dim(fields: Fields, family: _Family, hidden: int, heads: int) -> int:
    if family.head_dim or "head_dim" in fields:
        return fields.integer("head_dim", 2, 2**10, family.head_dim)
    head_dim, remainder = divmod(hidden, heads)
    if head_dim < 2 or remainder:
        raise fields.refuse("hidden_size", f"a multiple of num_attention_heads ({heads})")
    return head_dim


def _activation(fields: Fields, family: _Family, where: str) -> Activation:
    name = fields.text(family.activation_key, family.activation)
    if name not in _ACTIVATIONS:
        raise ModelRefused(f"{where}: activation {name!r:.50} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _soft_cap(fields: Fields, key: str, default: float) -> float:
    """A soft cap; 0 if there is none, which null means."""
    return 0.0 if fields.null(key) else fields.number(key, 1e-3, 1e9, default)


def _eos_ids(fields: Fields, family: _Family, vocab: int) -> tuple[int, ...]:
    """The end-of-sequence ids; the default of the family if the field is absent. null means that there are none."""
    if "eos_token_id" in fields or fields.null("eos_token_id"):
        return fields.ids("eos_token_id", vocab)
    return tuple(filter(range(vocab).__contains__, family.eos))


def _unknown(fields: Fields) -> ModelConfig:
    """The ModelConfig of an architecture that is not in FAMILIES. Only the fields that the engine needs are set.

    A backend with its own models may support the architecture, so nothing is refused here. Multimodal models have these
    fields in text_config.
    """
    text = fields
    if "vocab_size" not in fields:
        text = _readable(lambda: fields.table("text_config"), fields) or fields

    def integer(key: str, high: int, default: int) -> int:
        return _readable(lambda: text.integer(key, 1, high, default), default)

    vocab = integer("vocab_size", MAX_VOCAB, 0)
    return replace(
        EMPTY_CONFIG,
        model_type=fields.text("model_type"),
        vocab_size=vocab,
        hidden_size=integer("hidden_size", 2**17, 0),
        num_layers=integer("num_hidden_layers", 2**10, 0),
        max_positions=integer("max_position_embeddings", 2**27, 4096),
        dtype=_readable(lambda: text.text(text.either("dtype", "torch_dtype"), ""), ""),
        eos_ids=_readable(lambda: fields.ids("eos_token_id", vocab), ()),
    )


def _readable(read: Callable[[], T], default: T) -> T:
    try:
        return read()
    except ModelRefused:
        return default


def _layer_kinds(fields: Fields, family: _Family) -> tuple[tuple[LayerKind, ...], int]:
    """(kind of each layer, window). The window is 0 if no layer is sliding."""
    layers = fields.integer("num_hidden_layers", 1, 2**10)
    window = _window(fields, family)
    kinds = _default_kinds(fields, family, layers, window)
    if "layer_types" in fields:
        listed = _listed_kinds(fields, layers)
        if listed != kinds and not family.layer_types:
            raise fields.refuse("layer_types", f"{kinds[0]}_attention for every layer (this architecture has one kind)")
        kinds = listed
    if "sliding" not in kinds:
        return kinds, 0
    if window:
        return kinds, window
    if "sliding_window" in fields:
        raise fields.refuse("use_sliding_window", "true, because there are sliding layers")
    raise fields.refuse("sliding_window", "an integer, because there are sliding layers")


def _window(fields: Fields, family: _Family) -> int:
    default = 0 if fields.null("sliding_window") else family.window
    # transformers 5 writes 0 for Qwen 2 with experts and without a window.
    window = fields.integer("sliding_window", 0 if family.alternating else 1, 2**27, default)
    return window if fields.flag("use_sliding_window", family.windowed) else 0


def _default_kinds(fields: Fields, family: _Family, layers: int, window: int) -> tuple[LayerKind, ...]:
    """The kinds of the layers if config.json has no layer_types field."""
    if family.pattern:
        pattern = fields.integer("sliding_window_pattern", 1, layers + 6, 6)
        period = (_SLIDING,) * (pattern - 1) + (_FULL,)
        return tuple(period[layer % pattern] for layer in range(layers))
    if family.alternating:
        return _alternating_kinds(fields, family, layers)
    first_sliding = layers
    if window:
        first_sliding = min(layers, fields.integer("max_window_layers", 0, 2**10, family.window_layers))
    return (_FULL,) * first_sliding + (_SLIDING,) * (layers - first_sliding)


def _alternating_kinds(fields: Fields, family: _Family, layers: int) -> tuple[LayerKind, ...]:
    """Every second layer is sliding, from the first one on, up to the layer max_window_layers."""
    end = 0
    if fields.flag("use_sliding_window", family.windowed):
        end = fields.integer("max_window_layers", 0, 2**10, family.window_layers or layers)
    return tuple(_SLIDING if index % 2 == 0 and index < end else _FULL for index in range(layers))


def _listed_kinds(fields: Fields, layers: int) -> tuple[LayerKind, ...]:
    names = fields.texts("layer_types")
    if len(names) != layers or not set(names) <= _LAYER_KINDS.keys():
        raise fields.refuse("layer_types", f"a list of {layers} names, each one of {_KIND_NAMES}")
    return tuple(_LAYER_KINDS[name] for name in names)


def _ropes(
    fields: Fields, family: _Family, kinds: tuple[LayerKind, ...], head_dim: int, positions: int
) -> Mapping[LayerKind, Rope]:
    """The rope of each kind of layer.

    transformers 5 writes rope_parameters: one table, or one for each layer type if they differ. transformers 4 wrote
    rope_theta and rope_scaling. For Gemma 3 it also wrote rope_local_base_freq for sliding layers, to which
    rope_scaling does not apply.
    """
    tables = _tables_by_kind(fields) if family.pattern else _shared_table(fields, family)
    thetas = {"full": fields.number("rope_theta", 1.0, 1e15, family.theta)}
    thetas["sliding"] = thetas["full"]
    if family.pattern:
        thetas["sliding"] = fields.number("rope_local_base_freq", 1.0, 1e15, LOCAL_THETA)
    ropes: dict[LayerKind, Rope] = {}
    for kind in dict.fromkeys(kinds):
        ropes[kind] = _rope(fields, family, tables[kind], thetas[kind], head_dim, positions)
    return MappingProxyType(ropes)


def _shared_table(fields: Fields, family: _Family) -> dict[LayerKind, Fields]:
    """The rope table of an architecture with one rope for all layers."""
    table = fields.table("rope_scaling")
    if not table:
        table = fields.table("rope_parameters")
    if not table:
        table = Fields(family.rope or {}, "config.json: rope_parameters")
    for name in _LAYER_KINDS:
        if name in table:
            raise table.refuse(name, "absent (this architecture has one rope for all layers)")
    return dict.fromkeys(_LAYER_KINDS.values(), table)


def _tables_by_kind(fields: Fields) -> dict[LayerKind, Fields]:
    """The rope tables of an architecture with a rope for each kind of layer."""
    parameters = fields.table("rope_parameters")
    for name in parameters:
        if name not in _LAYER_KINDS:
            raise parameters.refuse(name, f"inside one of {_KIND_NAMES}")
    older = fields.table("rope_scaling")
    if older.either("rope_type", "type") == "type":
        raise older.refuse(
            "type", "renamed to rope_type (releases of transformers disagree on `type` for this architecture)"
        )
    tables = {kind: parameters.table(name) for name, kind in _LAYER_KINDS.items()}
    tables["full"] = tables["full"].updated(older)
    for table in tables.values():
        if not table.flag("truncate", True):
            raise table.refuse("truncate", "true (transformers supports no other value for this architecture)")
    return tables


def _rope(fields: Fields, family: _Family, table: Fields, theta: float, head_dim: int, positions: int) -> Rope:
    """The rope of one table. `theta` is the default of rope_theta, `positions` that of
    original_max_position_embeddings."""
    kind = table.text(table.either("rope_type", "type"), "default")
    if kind in family.longrope_names:
        kind = "longrope"
    if kind not in family.rope_kinds:
        raise ModelRefused(
            f"config.json: rope type {kind!r:.50} is not supported",
            f"supported: {', '.join(family.rope_kinds)}",
        )
    theta = table.number("rope_theta", 1.0, 1e15, theta)
    rope = Rope("default", theta, _rotary_dim(fields, family, table, kind, head_dim))
    if kind == "default":
        return rope
    original = table.integer("original_max_position_embeddings", 1, 2**27, positions)
    # The field at the top level of config.json overrides that of rope_parameters. Phi-3 always has it at the top level.
    if not family.pattern:
        default = family.original_positions or original
        original = fields.integer("original_max_position_embeddings", 1, 2**27, default)
    return _SCALED_ROPES[kind](rope, table, original, positions)


def _linear(rope: Rope, table: Fields, original: int, positions: int) -> Rope:
    return replace(rope, kind="linear", factor=table.number("factor", 1e-3, 1e6))


def _llama3(rope: Rope, table: Fields, original: int, positions: int) -> Rope:
    low = table.number("low_freq_factor", 1e-3, 1e6)
    high = table.number("high_freq_factor", 1e-3, 1e6)
    if high <= low:
        raise table.refuse("high_freq_factor", f"greater than low_freq_factor ({low:g})")
    return replace(
        rope,
        kind="llama3",
        factor=table.number("factor", 1e-3, 1e6),
        original_positions=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: Rope, table: Fields, original: int, positions: int) -> Rope:
    factor = table.number("factor", 1e-3, 1e6)
    return replace(
        rope,
        kind="yarn",
        factor=factor,
        original_positions=original,
        beta_fast=table.number("beta_fast", 1e-3, 1e6, 32.0),
        beta_slow=table.number("beta_slow", 1e-3, 1e6, 1.0),
        truncate=table.flag("truncate", True),
        attention_factor=_yarn_attention_factor(table, factor),
    )


def _yarn_attention_factor(table: Fields, factor: float) -> float:
    extension = math.log(max(factor, 1.0))

    def scale(weight: float) -> float:
        return 0.1 * weight * extension + 1.0

    mscale = table.number("mscale", 0.0, 1e3, 0.0)
    all_dims = table.number("mscale_all_dim", 0.0, 1e3, 0.0)
    default = scale(1.0)
    if mscale and all_dims:
        default = scale(mscale) / scale(all_dims)
    return table.number("attention_factor", 0.0, 1e6, default)


def _longrope(rope: Rope, table: Fields, original: int, positions: int) -> Rope:
    factor = table.number("factor", 1e-3, 1e6, positions / original)
    default = 1.0
    if factor > 1 and original > 1:
        default = math.sqrt(1 + math.log(factor) / math.log(original))
    return replace(
        rope,
        kind="longrope",
        factor=factor,
        original_positions=original,
        attention_factor=table.number("attention_factor", 0.0, 1e6, default),
        short_factors=table.numbers("short_factor", rope.rotary_dim // 2),
        long_factors=table.numbers("long_factor", rope.rotary_dim // 2),
    )


_SCALED_ROPES: Mapping[str, Callable[[Rope, Fields, int, int], Rope]] = MappingProxyType(
    {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
)


def _rotary_dim(fields: Fields, family: _Family, table: Fields, kind: str, head_dim: int) -> int:
    """The number of rotated dimensions per head.

    For most architectures transformers accepts partial_rotary_factor, but does not support it: the default rope type
    ignores it, and the attention fails with a scaled rope type. Such a model is refused.
    """
    if kind == "default" and not family.partial_rotary:
        return _even(head_dim)
    share = fields.number("partial_rotary_factor", 1e-3, 1.0, family.rotary_share)
    dim = int(head_dim * table.number("partial_rotary_factor", 1e-3, 1.0, share))
    if dim != head_dim and not family.partial_rotary:
        source = table if "partial_rotary_factor" in table else fields
        raise source.refuse("partial_rotary_factor", f"1 (rope type {kind} of this architecture needs it)")
    return _even(dim)


def _even(dim: int) -> int:
    if dim < 2 or dim % 2:
        raise ModelRefused(f"config.json: the rotary dimensions per head must be an even number, not {dim}")
    return dim
