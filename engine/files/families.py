"""The architectures that localllm describes, with the config.json fields of each and their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from . import latent_config, layer_config, moe_config, recurrent_config
from .latent_config import LatentFamily
from .moe_config import MoeFamily
from .recurrent_config import DeltaProjections

LayerKind = Literal["full", "sliding", "recurrent"]
# Names of layer_types in config.json
ATTENTION: Mapping[str, LayerKind] = MappingProxyType({"full_attention": "full", "sliding_attention": "sliding"})
LINEAR: Mapping[str, LayerKind] = MappingProxyType({"full_attention": "full", "linear_attention": "recurrent"})
MAMBA: Mapping[str, LayerKind] = MappingProxyType({**LINEAR, "attention": "full", "mamba": "recurrent"})
CONV: Mapping[str, LayerKind] = MappingProxyType({"full_attention": "full", "conv": "recurrent"})


@dataclass(frozen=True, slots=True)
class Family:
    """The config.json fields of an architecture, with the defaults of the config class in transformers."""

    max_positions: int
    vocab: int = 0  # default of vocab_size; 0: no default, as published files have the field
    heads: int = 0  # default of num_attention_heads; 0: no default
    optional: tuple[str, ...] = ()  # the fields of OPTIONAL that this architecture reads
    kv_heads: int = 0  # default of num_key_value_heads; 0: num_attention_heads
    inner_name: str = "intermediate_size"  # name of the field with the inner size of dense MLPs
    inner: int = 0  # default of `inner_name`; 0: no default
    adjusts_inner: bool = False  # default of block_auto_adjust_ff_dim: whether two thirds of `inner_name` are rounded
    head_dim: int = 0  # default of head_dim; 0: hidden_size / num_attention_heads
    reads_head_dim: bool = True  # False: always hidden_size / num_attention_heads
    default_of_null_head_dim: bool = True  # False: null means hidden_size / num_attention_heads
    norm_eps: float = 1e-6
    norm_eps_name: str = "rms_norm_eps"
    activation_key: str = "hidden_act"  # empty: the architecture always has the default
    activation: str = "silu"
    gelu_is_tanh: bool = False  # whether the activation "gelu" means its tanh approximation
    tie: bool = False
    attention_bias: bool = False  # default of this field
    # Default of the field qkv_bias; the field attention_bias may add this bias.
    qkv_bias: bool = False
    output_bias: bool = True  # whether attention_bias also adds the bias of the output projection
    head_norms: bool = False  # default of use_qk_norm
    # Default of sliding_window_pattern: of this number of layers the last one is full, the others are sliding. 0: no
    # such pattern.
    pattern: int = 0
    ropes_by_kind: bool = False  # whether rope_parameters has a table for each kind of layer
    # Default of rope_local_base_freq, the theta of sliding layers. 0: their theta is in rope_parameters, or is `theta`.
    local_theta: float = 0.0
    # Whether full layers have a rope. "unmixed": only if sliding_window is null.
    full_ropes: Literal["always", "never", "unmixed"] = "always"
    alternating: bool = False  # True: without `pattern`, every second layer is sliding, from the first layer on
    window: int = 0
    null_window: bool = True  # whether null for sliding_window means that there is none; else it means the default
    windowed: bool = True  # default of use_sliding_window
    # Default of max_window_layers. With `alternating`: the index from which no layer is sliding; 0: no such index.
    # Without `pattern` and `alternating`: the index of the first sliding layer.
    window_layers: int = 0
    layer_names: Mapping[str, LayerKind] = field(default_factory=lambda: ATTENTION)  # names in the field layer_types
    # Default of full_attention_interval: of this number of layers the last one has attention, and the others are
    # recurrent. 0: no layer is recurrent.
    attention_interval: int = 0
    # Name of the field with the indices of the attention layers, if there are no layer_types.
    attention_indices: str = "full_attn_idxs"
    layer_types: bool = True  # whether a layer_types field may override these defaults
    # Default of no_rope_layer_interval: of this number of layers the last one has no rope. That layer has a window if
    # the model has one. 0: all layers have a rope.
    no_rope_interval: int = 0
    theta: float = 10_000.0
    partial_rotary: bool = False  # whether rotary_dim may be less than head_dim
    # Default of rope_parameters. With ropes_by_kind, config.json then has no rope field of transformers 4.
    rope: Mapping[str, Any] | None = None
    query_scaling: bool = False  # whether rope_parameters has llama_4_scaling_beta
    # Whether layers with a rope attend within chunks of attention_chunk_size positions, so that the longest context is
    # a chunk, and the queries of the other layers have factors (attn_temperature_tuning).
    chunked: bool = False
    rotary_share: float = 1.0  # default of partial_rotary_factor
    rope_kinds: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
    # Other names of a rope kind in files of this architecture -> the kind.
    rope_names: Mapping[str, str] = field(default_factory=dict)
    original_positions: int = 0  # default of original_max_position_embeddings; 0: no default
    query_scalar: int = 0  # default of query_pre_attn_scalar; 0: equal to head_dim
    attention_scale: float = 0.0  # default of attention_multiplier; 0: query_pre_attn_scalar decides
    logit_scale: float = 0.0  # default of logit_scale; 0: logits_scaling, a divisor, has the factor
    logit_soft_cap: float = 0.0  # default of final_logit_softcapping
    attention_soft_cap: float = 0.0  # default of attn_logit_softcapping
    eos: tuple[int, ...] = ()
    eos_of_null: bool = False  # whether null for eos_token_id means `eos`; else it means that there are none
    moe: MoeFamily | None = None  # None: the architecture has no experts
    latent: LatentFamily | None = None  # None: the architecture has heads of keys and values
    last_full: bool = False  # whether the last layer is full, whatever layer_types and the pattern say
    per_layer: bool = False  # whether the architecture has the fields of engine/files/layer_config.py
    rope_alpha: bool = False  # whether the rope kind "dynamic" with a field alpha is a rope with a larger theta
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields that must have this value if they are present
    mamba: bool = False  # whether the recurrent layers are Mamba2; without a list, no layer has attention
    delta: DeltaProjections | None = None  # of Gated DeltaNet in the recurrent layers; None: they have another mixer
    conv: bool = False  # whether the recurrent layers are short convolutions
    output_gate: bool = False  # whether gates multiply the outputs of attention; q_proj computes them
    predicts: bool = False  # whether files may have a layer after the last one, which predicts several tokens at a time


# Only the architectures that list these fields in `optional` read them; the others ignore any value.
OPTIONAL = frozenset(
    {
        "attention_bias",
        "attention_out_bias",
        "mlp_bias",
        "sliding_window",
        "sliding_window_pattern",
        "use_sliding_window",
        "max_window_layers",
        "query_pre_attn_scalar",
        "final_logit_softcapping",
        "attn_logit_softcapping",
        "qkv_bias",
        "use_qk_norm",
        "attention_multiplier",
        "embedding_multiplier",
        "residual_multiplier",
        "logits_scaling",
        "no_rope_layers",
        "no_rope_layer_interval",
        "logit_scale",
        "attention_chunk_size",
        "attn_temperature_tuning",
        "attn_scale",
        "floor_scale",
        "position_embedding_type",
        "rotary_dim",
        "use_bias",
        "full_attention_interval",
        "full_attn_idxs",
        "attn_layer_indices",
        "layers_block_type",
        "tie_embedding",
        "block_ff_dim",
        "block_auto_adjust_ff_dim",
        "block_ffn_dim_multiplier",
        "block_multiple_of",
        *moe_config.OPTIONAL,
        *latent_config.OPTIONAL,
        *recurrent_config.OPTIONAL,
        *layer_config.FIELDS,
    }
)
_LFM2 = Family(
    max_positions=128_000,
    vocab=65_536,
    heads=32,
    optional=(
        *recurrent_config.CONV,
        "full_attn_idxs",
        "tie_embedding",
        "block_ff_dim",
        "block_auto_adjust_ff_dim",
        "block_ffn_dim_multiplier",
        "block_multiple_of",
    ),
    kv_heads=8,
    inner=12_288,
    adjusts_inner=True,
    norm_eps=1e-5,
    norm_eps_name="norm_eps",
    activation_key="",
    tie=True,
    head_norms=True,
    layer_names=CONV,
    theta=1_000_000.0,
    eos=(2,),
    conv=True,
)
_HYBRID = ("attention_bias", "full_attention_interval", *recurrent_config.DELTA)
_QWEN_WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers")
# The three positions of a token of text are equal, so its multimodal rope is the default rope.
_MROPE: Mapping[str, str] = MappingProxyType({"mrope": "default"})
_QWEN2_VL = Family(
    max_positions=32_768,
    optional=_QWEN_WINDOW,
    kv_heads=8,
    norm_eps=1e-5,
    qkv_bias=True,
    window=4096,
    windowed=False,
    window_layers=80,
    theta=1_000_000.0,
    rope_names=_MROPE,
    eos=(151_645,),
)

_GLM = Family(
    max_positions=131_072,
    optional=("attention_bias",),
    kv_heads=2,
    head_dim=128,
    norm_eps=1.5625e-7,
    attention_bias=True,
    output_bias=False,
    layer_types=False,
    partial_rotary=True,
    rotary_share=0.5,
    eos=(151_329, 151_336, 151_338),
    eos_of_null=True,
)
_DEEPSEEK_V3 = Family(
    max_positions=4096,
    optional=("attention_bias", "rope_interleave", *moe_config.DEEPSEEK, *latent_config.FIELDS),
    kv_heads=128,
    layer_types=False,
    rope_kinds=("default", "linear", "llama3", "yarn"),
    eos=(1,),
    moe=MoeFamily(
        ("n_routed_experts", "num_local_experts"),
        experts=256,
        top_k=8,
        inner=2048,
        score="sigmoid",
        renormalise=True,
        scale=2.5,
        groups=8,
        top_groups=4,
        methods=("noaux_tc",),
        shared_experts=1,
        dense_layers=3,
        group_score="top2",
    ),
    latent=LatentFamily(),
    predicts=True,
)

_GRANITE = (
    "attention_bias",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
_GRANITE_EXPERTS = MoeFamily(
    ("num_local_experts",), experts=8, top_k=2, inner_name="intermediate_size", inner=11_008, renormalise=True
)

_COHERE = Family(
    max_positions=8192,
    optional=("attention_bias", "logit_scale"),
    norm_eps=1e-5,
    norm_eps_name="layer_norm_eps",
    tie=True,
    theta=500_000.0,
    logit_scale=0.0625,
    eos=(255_001,),
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "bamba": Family(
            max_positions=262_144,
            vocab=128_000,
            heads=32,
            optional=("attention_bias", "mlp_bias", "attn_layer_indices", *recurrent_config.MAMBA),
            kv_heads=8,
            inner=14_336,
            norm_eps=1e-5,
            layer_names=MAMBA,
            attention_indices="attn_layer_indices",
            layer_types=False,
            partial_rotary=True,
            rotary_share=0.5,
            fixed=MappingProxyType({"partial_rotary_factor": 0.5}),
            eos=(2,),
            mamba=True,
        ),
        "cohere": replace(_COHERE, fixed=MappingProxyType({"use_qk_norm": False}), layer_types=False),
        "cohere2": replace(
            _COHERE,
            optional=(*_COHERE.optional, "sliding_window", "sliding_window_pattern"),
            theta=10_000.0,
            reads_head_dim=False,
            pattern=4,
            window=4096,
            full_ropes="never",
        ),
        "deepseek_v2": Family(
            max_positions=2048,
            optional=("attention_bias", "mlp_bias", *moe_config.DEEPSEEK, *latent_config.FIELDS),
            layer_types=False,
            rope_kinds=("default", "linear", "llama3", "yarn"),
            eos=(2,),
            moe=MoeFamily(
                ("n_routed_experts", "num_experts"),
                experts=64,
                top_k=None,
                inner=1407,
                can_renormalise=False,
                groups=None,
                top_groups=None,
                methods=("greedy", "group_limited_greedy"),
                shared_experts=2,
            ),
            latent=LatentFamily(),
        ),
        "deepseek_v3": _DEEPSEEK_V3,
        "dots1": Family(
            max_positions=2048,
            optional=("attention_bias", "sliding_window", "max_window_layers", *moe_config.GROUPED),
            kv_heads=32,
            head_norms=True,
            window=4096,
            window_layers=62,
            moe=MoeFamily(
                ("n_routed_experts", "num_local_experts"),
                experts=None,
                top_k=None,
                inner=1408,
                score="sigmoid",
                shared_experts=None,
                group_score="top2",
            ),
        ),
        "ernie4_5": Family(
            max_positions=131_072,
            optional=("use_bias",),
            kv_heads=2,
            head_dim=128,
            default_of_null_head_dim=False,
            norm_eps=1e-5,
            tie=True,
            layer_types=False,
            theta=500_000.0,
            eos=(2,),
        ),
        "ernie4_5_moe": Family(
            max_positions=131_072,
            optional=("use_bias", *moe_config.ERNIE),
            fixed=MappingProxyType({"use_bias": False}),
            kv_heads=4,
            norm_eps=1e-5,
            tie=True,
            layer_types=False,
            theta=500_000.0,
            eos=(2,),
            moe=MoeFamily(
                ("moe_num_experts", "num_experts"),
                experts=64,
                top_k=6,
                inner=1536,
                renormalise=True,
                shared_experts=2,
                shared_name="moe_num_shared_experts",
                dense_layers=1,
            ),
        ),
        "exaone4": Family(
            max_positions=2048,
            optional=("sliding_window", "sliding_window_pattern"),
            kv_heads=32,
            norm_eps=1e-5,
            head_norms=True,
            pattern=4,
            full_ropes="unmixed",
            window=4096,
            eos=(2,),
        ),
        "gemma": Family(
            max_positions=8192,
            optional=("attention_bias",),
            kv_heads=16,
            head_dim=256,
            activation="gelu_pytorch_tanh",
            gelu_is_tanh=True,
            tie=True,
            layer_types=False,
            eos=(1,),
        ),
        "gemma2": Family(
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
        "gemma3_text": Family(
            max_positions=131_072,
            optional=(
                "attention_bias",
                "sliding_window",
                "sliding_window_pattern",
                "query_pre_attn_scalar",
                "final_logit_softcapping",
            ),
            kv_heads=4,
            head_dim=256,
            activation_key="hidden_activation",
            activation="gelu_pytorch_tanh",
            tie=True,
            head_norms=True,
            vocab=262_208,
            heads=8,
            pattern=6,
            ropes_by_kind=True,
            local_theta=10_000.0,
            window=4096,
            theta=1_000_000.0,
            query_scalar=256,
            eos=(1,),
        ),
        "gemma4_text": Family(
            max_positions=131_072,
            vocab=262_144,
            heads=8,
            optional=("attention_bias", "sliding_window", "final_logit_softcapping", *layer_config.FIELDS),
            kv_heads=4,
            head_dim=256,
            activation_key="hidden_activation",
            activation="gelu_pytorch_tanh",
            tie=True,
            head_norms=True,
            pattern=6,
            last_full=True,
            per_layer=True,
            ropes_by_kind=True,
            window=512,
            null_window=False,
            rope=MappingProxyType(
                {
                    "full_attention": {
                        "rope_type": "proportional",
                        "rope_theta": 1_000_000.0,
                        "partial_rotary_factor": 0.25,
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                }
            ),
            rope_kinds=("default", "linear", "proportional"),
            query_scalar=1,
            eos=(1,),
            moe=MoeFamily(
                ("num_experts",),
                experts=None,
                top_k=None,
                renormalise=True,
                switch="enable_moe_block",
            ),
        ),
        "glm": _GLM,
        "glm4": _GLM,
        "glm4_moe": Family(
            max_positions=131_072,
            optional=("attention_bias", "use_qk_norm", *moe_config.GROUPED),
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
            predicts=True,
        ),
        "glm4_moe_lite": Family(
            max_positions=202_752,
            optional=(
                "attention_bias",
                "rope_interleave",
                "mlp_layer_types",
                *(field for field in moe_config.DEEPSEEK if field != "first_k_dense_replace"),
                *latent_config.FIELDS,
            ),
            kv_heads=20,
            norm_eps=1e-5,
            layer_types=False,
            rope_kinds=("default", "linear", "llama3", "yarn"),
            eos=(1,),
            moe=MoeFamily(
                ("n_routed_experts", "num_local_experts"),
                experts=64,
                top_k=4,
                inner=1536,
                score="sigmoid",
                renormalise=True,
                scale=1.8,
                methods=("noaux_tc",),
                shared_experts=1,
                dense_layers=1,
                group_score="top2",
            ),
            latent=LatentFamily(query_rank=768, plain_dim=192, value_dim=256, head_dim_is_rotary=True),
            predicts=True,
        ),
        "gpt_oss": Family(
            max_positions=131_072,
            optional=("attention_bias", "sliding_window", *moe_config.CLAMPED),
            kv_heads=8,
            head_dim=64,
            norm_eps=1e-5,
            attention_bias=True,
            alternating=True,
            window=128,
            activation_key="",
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
        "granite": Family(
            max_positions=2048,
            optional=(
                "attention_bias",
                "mlp_bias",
                "attention_multiplier",
                "embedding_multiplier",
                "residual_multiplier",
                "logits_scaling",
            ),
            layer_types=False,
            attention_scale=1.0,
            eos=(2,),
        ),
        "granitemoe": Family(
            max_positions=2048,
            optional=_GRANITE,
            layer_types=False,
            attention_scale=1.0,
            eos=(2,),
            moe=_GRANITE_EXPERTS,
        ),
        "granitemoehybrid": Family(
            max_positions=2048,
            optional=(
                *_GRANITE,
                "position_embedding_type",
                "shared_intermediate_size",
                "layers_block_type",
                *recurrent_config.MAMBA,
            ),
            layer_names=MAMBA,
            inner_name="shared_intermediate_size",
            inner=1024,
            mamba=True,
            attention_scale=1.0,
            eos=(2,),
            moe=replace(
                _GRANITE_EXPERTS, optional=True, shared_inner=1024, shared_inner_name="shared_intermediate_size"
            ),
        ),
        "hunyuan_v1_dense": Family(
            max_positions=2048,
            optional=("attention_bias",),
            norm_eps=1e-5,
            head_norms=True,
            layer_types=False,
            rope_alpha=True,
            eos=(2,),
        ),
        "kimi_k2": _DEEPSEEK_V3,
        "lfm2": _LFM2,
        "lfm2_moe": replace(
            _LFM2,
            optional=(
                *recurrent_config.CONV,
                "tie_embedding",
                "num_dense_layers",
                "norm_topk_prob",
                "routed_scaling_factor",
            ),
            fixed=MappingProxyType({"use_expert_bias": True}),
            inner=7168,
            adjusts_inner=False,
            moe=MoeFamily(
                ("num_experts",),
                experts=32,
                top_k=4,
                inner=1792,
                score="sigmoid",
                renormalise=True,
                dense_layers=2,
                dense_name="num_dense_layers",
            ),
        ),
        "llama": Family(max_positions=2048, optional=("attention_bias", "mlp_bias"), layer_types=False, eos=(2,)),
        "minimax_m2": Family(
            max_positions=196_608,
            optional=("rotary_dim", "scoring_func"),
            kv_heads=8,
            head_dim=128,
            head_norms=True,
            layer_types=False,
            theta=5_000_000.0,
            partial_rotary=True,
            eos=(200_020,),
            moe=MoeFamily(
                ("num_local_experts", "num_experts"),
                experts=256,
                top_k=8,
                inner_name="intermediate_size",
                inner=1536,
                score="sigmoid",
                renormalise=True,
            ),
        ),
        "llama4_text": Family(
            max_positions=131_072,
            vocab=202_048,
            heads=40,
            optional=(
                "attention_bias",
                "use_qk_norm",
                "no_rope_layers",
                "no_rope_layer_interval",
                "attention_chunk_size",
                "attn_temperature_tuning",
                "attn_scale",
                "floor_scale",
                "moe_layers",
                "interleave_moe_layer_step",
            ),
            inner_name="intermediate_size_mlp",
            inner=16_384,
            kv_heads=8,
            head_dim=128,
            norm_eps=1e-5,
            head_norms=True,
            layer_names=MappingProxyType({"chunked_attention": "full", "full_attention": "full"}),
            no_rope_interval=4,
            chunked=True,
            theta=500_000.0,
            eos=(2,),
            moe=MoeFamily(
                ("num_local_experts", "num_experts"),
                experts=16,
                top_k=1,
                inner_name="intermediate_size",
                inner=8192,
                score="sigmoid",
                shared_experts=1,
            ),
        ),
        "ministral3": Family(
            max_positions=262_144,
            optional=("sliding_window",),
            kv_heads=8,
            head_dim=128,
            norm_eps=1e-5,
            layer_types=False,
            rope=MappingProxyType(
                {
                    "rope_type": "yarn",
                    "rope_theta": 1_000_000.0,
                    "factor": 16.0,
                    "original_max_position_embeddings": 16_384,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "mscale_all_dim": 1.0,
                    "mscale": 1.0,
                    "llama_4_scaling_beta": 0.1,
                }
            ),
            query_scaling=True,
            eos=(2,),
        ),
        "mistral": Family(max_positions=131_072, optional=("sliding_window",), kv_heads=8, window=4096, eos=(2,)),
        "mixtral": Family(
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
        "olmoe": Family(
            max_positions=4096,
            optional=("attention_bias", "norm_topk_prob"),
            fixed=MappingProxyType({"clip_qkv": None}),
            norm_eps=1e-5,
            head_norms=True,
            layer_types=False,
            eos=(50_279,),
            moe=MoeFamily(
                ("num_experts", "num_local_experts"), experts=64, top_k=8, inner_name="intermediate_size", inner=2048
            ),
        ),
        "olmo2": Family(
            max_positions=2048,
            optional=("attention_bias",),
            norm_eps=1e-5,
            head_norms=True,
            layer_types=False,
            eos=(50_279,),
        ),
        "olmo3": Family(
            max_positions=2048,
            optional=("attention_bias", "sliding_window"),
            norm_eps=1e-5,
            head_norms=True,
            pattern=4,
            ropes_by_kind=True,
            window=4096,
            theta=500_000.0,
            eos=(50_279,),
        ),
        "phi3": Family(
            max_positions=4096,
            optional=("sliding_window",),
            norm_eps=1e-5,
            layer_types=False,
            partial_rotary=True,
            rope_kinds=("default", "longrope"),
            rope_names=MappingProxyType({"su": "longrope", "yarn": "longrope"}),
            original_positions=4096,
            eos=(32_000,),
        ),
        "qwen2": Family(
            max_positions=32_768,
            optional=_QWEN_WINDOW,
            kv_heads=32,
            qkv_bias=True,
            window=4096,
            windowed=False,
            window_layers=28,
        ),
        "qwen2_5_vl_text": _QWEN2_VL,
        "qwen2_moe": Family(
            max_positions=32_768,
            optional=(*_QWEN_WINDOW, "qkv_bias", *moe_config.QWEN, "shared_expert_intermediate_size"),
            kv_heads=16,
            qkv_bias=True,
            alternating=True,
            window=4096,
            windowed=False,
            window_layers=28,
            moe=MoeFamily(("num_experts",), experts=60, top_k=4, inner=1408, shared_inner=5632),
        ),
        "qwen2_vl_text": _QWEN2_VL,
        "qwen3": Family(
            max_positions=32_768,
            optional=("attention_bias", *_QWEN_WINDOW),
            kv_heads=32,
            head_dim=128,
            head_norms=True,
            window=4096,
            windowed=False,
            window_layers=28,
        ),
        "qwen3_moe": Family(
            max_positions=32_768,
            optional=("attention_bias", "sliding_window", "use_sliding_window", *moe_config.QWEN),
            kv_heads=4,
            head_norms=True,
            window=4096,
            windowed=False,
            layer_types=False,
            moe=MoeFamily(("num_experts", "num_local_experts"), experts=128, top_k=8, inner=768),
        ),
        "qwen3_5_moe_text": Family(
            max_positions=32_768,
            optional=(*_HYBRID, "shared_expert_intermediate_size"),
            kv_heads=2,
            head_dim=256,
            inner=512,
            head_norms=True,
            layer_names=LINEAR,
            attention_interval=4,
            partial_rotary=True,
            rotary_share=0.25,
            moe=MoeFamily(
                ("num_experts", "num_local_experts"),
                experts=256,
                top_k=8,
                inner=512,
                renormalise=True,
                shared_inner=512,
            ),
            delta="separate",
            output_gate=True,
        ),
        "qwen3_5_text": Family(
            max_positions=32_768,
            optional=_HYBRID,
            kv_heads=4,
            head_dim=256,
            inner=12_288,
            head_norms=True,
            layer_names=LINEAR,
            attention_interval=4,
            partial_rotary=True,
            rotary_share=0.25,
            delta="separate",
            output_gate=True,
        ),
        "qwen3_next": Family(
            max_positions=32_768,
            optional=(*_HYBRID, *moe_config.QWEN, "shared_expert_intermediate_size"),
            kv_heads=2,
            head_dim=256,
            inner=5632,
            head_norms=True,
            layer_names=LINEAR,
            attention_interval=4,
            partial_rotary=True,
            rotary_share=0.25,
            moe=MoeFamily(
                ("num_experts", "num_local_experts"),
                experts=512,
                top_k=10,
                inner=512,
                renormalise=True,
                shared_inner=512,
            ),
            delta="interleaved",
            output_gate=True,
        ),
        "qwen3_vl_moe_text": Family(
            max_positions=128_000,
            optional=("attention_bias", "decoder_sparse_step", "mlp_only_layers"),
            kv_heads=16,
            head_norms=True,
            layer_types=False,
            tie=True,
            theta=500_000.0,
            rope_names=_MROPE,
            moe=MoeFamily(("num_experts", "num_local_experts"), experts=60, top_k=4, inner=1408, renormalise=True),
        ),
        "qwen3_vl_text": Family(
            max_positions=128_000,
            optional=("attention_bias",),
            kv_heads=32,
            head_dim=128,
            head_norms=True,
            layer_types=False,
            theta=500_000.0,
            rope_names=_MROPE,
        ),
        "seed_oss": Family(
            max_positions=524_288,
            optional=("attention_bias", "attention_out_bias", "mlp_bias"),
            kv_heads=8,
            head_dim=128,
            default_of_null_head_dim=False,
            attention_bias=True,
            output_bias=False,
            layer_types=False,
            eos=(2,),
        ),
        "smollm3": Family(
            max_positions=32_768,
            optional=(
                "attention_bias",
                "mlp_bias",
                "sliding_window",
                "use_sliding_window",
                "no_rope_layers",
                "no_rope_layer_interval",
            ),
            kv_heads=4,
            tie=True,
            windowed=False,
            theta=2_000_000.0,
            no_rope_interval=4,
            eos=(128_001,),
        ),
    }
)
