"""config.json -> ModelConfig, validated. Reads the formats of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from ..errors import ModelRefused
from . import latent_config
from .families import FAMILIES, OPTIONAL, Family, LayerKind
from .fields import Fields
from .latent_config import LatentConfig, parse_latent
from .layer_config import LayerConfig, parse_layer_config
from .layer_kinds import FULL, MAX_POSITIONS, RECURRENT, SLIDING, parse_layer_kinds, parse_rope_layers
from .moe_config import MAX_INNER, MoeConfig, parse_moe
from .multimodal import TEXT_MODELS, text_values
from .quantization import Quantization, parse_quantization
from .recurrent_config import ConvConfig, DeltaConfig, MambaConfig, StateShapes, parse_conv, parse_delta, parse_mamba
from .rope_config import QueryScaling, Rope, parse_query_scaling, parse_ropes, shared_table

T = TypeVar("T")
Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class LinearLayers:
    """The linear layers of a model that code outside of localllm computes, and its embedding."""

    values: int  # numbers of all their LoRA factors of rank 1
    count: int


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
    head_norms: bool  # whether the heads of queries and keys are normalised
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
    embedding_scale: float = 1.0  # factor of the embeddings
    residual_scale: float = (
        1.0  # factor of the outputs of attention and of the MLP, before they are added to the residual stream
    )
    logit_scale: float = 1.0  # factor of the logits
    rope_layers: tuple[bool, ...] = ()  # whether each layer rotates queries and keys; empty: all layers do
    query_scaling: QueryScaling | None = None  # None: the queries have no factors
    multimodal: str = ""  # model_type of the multimodal model that contains this text model; empty: none
    latent: LatentConfig | None = None  # None: attention has heads of keys and values
    delta: DeltaConfig | None = None  # None: no layer is a Gated DeltaNet
    conv: ConvConfig | None = None  # None: no layer is a short convolution
    mamba: MambaConfig | None = None  # None: no layer is Mamba2
    output_gate: bool = False  # whether gates multiply the outputs of attention; q_proj computes them
    linear: LinearLayers | None = None  # None: the other fields describe the linear layers
    layers: LayerConfig | None = None  # None: the layers differ in their kind at most
    warnings: tuple[str, ...] = ()  # values of config.json that have no effect on the logits

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """(parts, heads of a part, dimension of a head) of a token and a layer in the KV cache. The parts are keys and
        values; a latent cache has one part."""
        if self.latent:
            return 1, 1, self.latent.cache_dim
        return 2, self.num_kv_heads, self.head_dim

    @property
    def query_parts(self) -> int:
        """The number of vectors of a query head that q_proj computes: the query, and a gate if outputs have gates."""
        return 2 if self.output_gate else 1

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The indices of the layers that have keys and values."""
        return tuple(index for index, kind in enumerate(self.layer_kinds) if kind != RECURRENT)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The indices of the layers that have a recurrent state."""
        return tuple(index for index, kind in enumerate(self.layer_kinds) if kind == RECURRENT)

    @property
    def recurrent(self) -> DeltaConfig | ConvConfig | MambaConfig | None:
        """The mixer of the layers `state_layers`; None if no architecture of these layers is set."""
        return self.delta or self.conv or self.mamba

    @property
    def state_shapes(self) -> StateShapes | None:
        """The state of a sequence in a layer of `state_layers`; None if no architecture of these layers is set."""
        return None if self.recurrent is None else self.recurrent.shapes

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of a sequence in all layers."""
        shapes = self.state_shapes
        return 0 if shapes is None else len(self.state_layers) * shapes.values * STATE_ITEMSIZE

    def heads_of(self, kind: LayerKind) -> tuple[int, int]:
        """(heads of keys and values, dimension of a head) in the layers of a kind."""
        if self.layers and kind == FULL:
            return self.layers.full_kv_heads, self.layers.full_head_dim
        return self.num_kv_heads, self.head_dim

    @property
    def largest_head_dim(self) -> int:
        """The largest dimension of a head in any layer."""
        return max((dim for _, dim in map(self.heads_of, self.layer_kinds)), default=self.head_dim)

    @property
    def cached_layers(self) -> int:
        """Number of the first layers that store keys and values, or states, of their own."""
        return self.num_layers - (self.layers.shared_layers if self.layers else 0)

    @property
    def cached_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of the layers that have pages."""
        return tuple(kind for kind in self.layer_kinds[: self.cached_layers] if kind != RECURRENT)

    def cache_index(self, index: int) -> int:
        """The index of the pages of the layer `index`: those of the last earlier layer of its kind, if it shares
        them."""
        if index < self.cached_layers:
            return self.attention_layers.index(index)
        return max(layer for layer, kind in enumerate(self.cached_kinds) if kind == self.layer_kinds[index])


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


MAX_VOCAB = 2**24
STATE_ITEMSIZE = 4  # bytes of a value of a recurrent state
MAX_SCORE_CAP = 500.0  # kernels compute tanh(score / cap) by exponentials, which lose digits of small quotients
# The names of ACT2FN in transformers. Those of one function differ in rounding at most.
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_python_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_accurate": "gelu_tanh",
    }
)


def parse_config(values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Validate config.json. Raises ModelRefused with the name of the wrong field."""
    model_type = Fields(values, where).text("model_type")
    if model_type in TEXT_MODELS:
        text = parse_config(text_values(values, where), f"{where}: text_config")
        return replace(text, multimodal=model_type)
    family = FAMILIES.get(model_type)
    if family is None:
        return _unknown(Fields(values, where))
    fields = Fields(values, where, ignored=OPTIONAL.difference(family.optional))
    _refuse_other_models(fields, family, where)
    hidden = fields.integer("hidden_size", 1, 2**17)
    heads = fields.integer("num_attention_heads", 1, 2**10, family.heads or None)
    latent = None if family.latent is None else parse_latent(fields, family.latent)
    head_dim = latent.head_dim if latent else _head_dim(fields, family, hidden, heads)
    vocab = fields.integer("vocab_size", 1, MAX_VOCAB, family.vocab or None)
    any_bias = fields.flag("use_bias", family.attention_bias)
    bias = fields.flag("attention_bias", any_bias)
    positions = fields.integer("max_position_embeddings", 1, 2**63, family.max_positions)
    if positions > MAX_POSITIONS:
        fields.warn("max_position_embeddings", f"above the longest context of localllm, {MAX_POSITIONS} tokens")
    kinds, window = parse_layer_kinds(fields, family)
    kv_heads = _kv_heads(fields, family, heads)
    layers = parse_layer_config(fields, kinds, heads, kv_heads) if family.per_layer else None
    rope_dim = latent.rotary_dim if latent else head_dim
    rope_dims = {SLIDING: rope_dim, FULL: layers.full_head_dim if layers else rope_dim}
    ropes = parse_ropes(fields, family, kinds, rope_dims, positions)
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=_inner_size(fields, family),
        num_layers=len(kinds),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=_limited_by_chunk(fields, family, min(positions, MAX_POSITIONS)),
        norm_eps=fields.number(family.norm_eps_name, 1e-12, 1.0, family.norm_eps),
        activation=_activation(fields, family, where),
        tie_embeddings=fields.flag(fields.either("tie_embedding", "tie_word_embeddings"), family.tie),
        qkv_bias=fields.flag("qkv_bias", family.qkv_bias) or bias,
        output_bias=fields.flag("attention_out_bias", bias and family.output_bias),
        head_norms=fields.flag("use_qk_norm", family.head_norms),
        mlp_bias=fields.flag("mlp_bias", any_bias and "use_bias" in family.optional),
        layer_kinds=kinds,
        window=window,
        ropes=ropes,
        attention_scale=_attention_scale(fields, family, head_dim),
        logit_soft_cap=_soft_cap(fields, "final_logit_softcapping", family.logit_soft_cap, 1e9),
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", family.attention_soft_cap, MAX_SCORE_CAP),
        dtype=fields.text(fields.either("dtype", "torch_dtype"), ""),
        eos_ids=_eos_ids(fields, family, vocab),
        quantization=parse_quantization(fields, where),
        moe=None if family.moe is None else parse_moe(fields, family.moe, len(kinds)),
        embedding_scale=fields.number("embedding_multiplier", 1e-3, 1e6, 1.0),
        residual_scale=fields.number("residual_multiplier", 1e-3, 1e3, 1.0),
        logit_scale=_logit_scale(fields, family),
        rope_layers=parse_rope_layers(fields, family, kinds),
        latent=latent,
        layers=layers,
        query_scaling=parse_query_scaling(fields, family, ropes),
        delta=None if family.delta is None else parse_delta(fields, family.delta),
        conv=parse_conv(fields, hidden) if family.conv else None,
        mamba=_mamba(fields, kinds, hidden) if family.mamba else None,
        output_gate=family.output_gate,
        warnings=tuple(fields.warnings),
    )


def _refuse_other_models(fields: Fields, family: Family, where: str) -> None:
    """Refuse a model of a supported architecture if its config.json makes it anything but a plain decoder."""
    for key, supported in (("use_bidirectional_attention", False), ("is_causal", True)):
        # As in transformers, null is false.
        is_of_images = family.per_layer and fields.get(key) == "vision"  # of the tokens of an image
        if (key in fields or fields.null(key)) and bool(fields.get(key)) != supported and not is_of_images:
            raise ModelRefused(f"{where}: {key} is not supported: the model does not generate text")
    for key, value in family.fixed.items():
        if key in fields and fields.get(key) != value:
            raise fields.refuse(key, "absent or null" if value is None else str(value).lower())
    if not family.per_layer and len(fields.table("per_layer_config")):
        raise fields.refuse("per_layer_config", "empty (layers of different shapes are not supported)")


def _limited_by_chunk(fields: Fields, family: Family, positions: int) -> int:
    """The longest context. The layers of Llama 4 that attend within chunks have the first chunk only."""
    if not family.chunked or fields.null("attention_chunk_size"):
        return positions
    chunk = fields.integer("attention_chunk_size", 1, 2**27, 8192)
    if chunk < positions:
        fields.warnings.append(f"the context is limited to one chunk of {chunk} tokens (attention_chunk_size)")
    return min(positions, chunk)


def _mamba(fields: Fields, kinds: tuple[LayerKind, ...], hidden: int) -> MambaConfig | None:
    """The Mamba2 layers; None if there are none, but transformers checks their fields then too."""
    mamba = parse_mamba(fields, hidden)
    if RECURRENT not in kinds:
        return None
    fields.choice("hidden_act", ("silu", "swish"), "silu", "silu, because the convolutions have this activation")
    return mamba


def _inner_size(fields: Fields, family: Family) -> int:
    """The inner size of dense MLPs. LFM2 rounds two thirds of the size in config.json."""
    name = "block_ff_dim" if "block_ff_dim" in fields else family.inner_name
    inner = fields.integer(name, 1, MAX_INNER, family.inner or None)
    if not fields.flag("block_auto_adjust_ff_dim", family.adjusts_inner):
        return inner
    multiple = fields.integer("block_multiple_of", 1, MAX_INNER, 256)
    inner = int(fields.number("block_ffn_dim_multiplier", 1e-3, 1e3, 1.0) * int(2 * inner / 3))
    return -(-inner // multiple) * multiple


def _kv_heads(fields: Fields, family: Family, heads: int) -> int:
    default = family.kv_heads or heads
    if fields.null("num_key_value_heads"):
        default = heads
    kv_heads = fields.integer("num_key_value_heads", 1, 2**10, default)
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    if family.latent and kv_heads != heads:
        raise fields.refuse("num_key_value_heads", f"equal to num_attention_heads ({heads}) for latent attention")
    return kv_heads


def _head_dim(fields: Fields, family: Family, hidden: int, heads: int) -> int:
    if not family.reads_head_dim:
        return _divided(fields, hidden, heads)
    has_default = family.head_dim and (family.default_of_null_head_dim or not fields.null("head_dim"))
    if has_default or "head_dim" in fields:
        return fields.integer("head_dim", 2, 2**10, family.head_dim)
    return _divided(fields, hidden, heads)


def _divided(fields: Fields, hidden: int, heads: int) -> int:
    head_dim, remainder = divmod(hidden, heads)
    if head_dim < 2 or remainder:
        raise fields.refuse("hidden_size", f"a multiple of num_attention_heads ({heads})")
    return head_dim


def _activation(fields: Fields, family: Family, where: str) -> Activation:
    name = fields.text(family.activation_key, family.activation) if family.activation_key else family.activation
    if family.gelu_is_tanh and name == "gelu":
        return "gelu_tanh"
    if name not in ACTIVATIONS:
        raise ModelRefused(f"{where}: activation {name!r:.50} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _attention_scale(fields: Fields, family: Family, head_dim: int) -> float:
    if family.attention_scale:
        return fields.number("attention_multiplier", 1e-6, 1e6, family.attention_scale)
    scale: float = fields.number("query_pre_attn_scalar", 1e-6, 1e9, family.query_scalar or head_dim) ** -0.5
    if family.latent is None:
        return scale
    return scale * latent_config.scale_factor(shared_table(fields, family)[FULL])


def _logit_scale(fields: Fields, family: Family) -> float:
    if family.logit_scale:
        return fields.number("logit_scale", 1e-6, 1e6, family.logit_scale)
    return 1.0 / fields.number("logits_scaling", 1e-6, 1e6, 1.0)


def _soft_cap(fields: Fields, key: str, default: float, high: float) -> float:
    """A soft cap up to `high`; 0 if there is none, which null means."""
    return 0.0 if fields.null(key) else fields.number(key, 1e-3, high, default)


def _eos_ids(fields: Fields, family: Family, vocab: int) -> tuple[int, ...]:
    """The end-of-sequence ids; the default of the family if the field is absent. For most families null means that
    there are none."""
    is_empty = fields.null("eos_token_id") and not family.eos_of_null
    if "eos_token_id" in fields or is_empty:
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
        eos_ids=fields.ids("eos_token_id", vocab or MAX_VOCAB),
        warnings=tuple(fields.warnings),
    )


def _readable(read: Callable[[], T], default: T) -> T:
    try:
        return read()
    except ModelRefused:
        return default
