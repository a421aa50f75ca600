"""The fields of config.json that describe a mixture of experts -> MoeConfig, validated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .fields import Fields

Score = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]

MAX_EXPERTS = 2**12
MAX_INNER = 2**17  # with int8, sums of more products of two numbers may not fit in 32 bits

# Only the architectures that list these fields in `optional` read them; the others ignore any value.
OPTIONAL = frozenset(
    {
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
        "first_k_dense_replace",
        "shared_expert_intermediate_size",
        "n_shared_experts",
        "routed_scaling_factor",
        "n_group",
        "topk_group",
        "swiglu_alpha",
        "swiglu_limit",
        "topk_method",
        "scoring_func",
        "moe_layer_freq",
        "mlp_layer_types",
        "moe_layers",
        "interleave_moe_layer_step",
        "shared_intermediate_size",
        "moe_k",
        "moe_num_experts",
        "moe_num_shared_experts",
        "moe_layer_start_index",
        "moe_layer_end_index",
        "moe_layer_interval",
        "moe_norm_min",
        "num_dense_layers",
    }
)
CLAMPED = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # the only supported values, which are those of the op
QWEN = ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
GROUPED = (
    "norm_topk_prob",
    "first_k_dense_replace",
    "n_shared_experts",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
)
DEEPSEEK = (*GROUPED, "topk_method", "scoring_func", "moe_layer_freq")
ERNIE = (
    "moe_k",
    "moe_num_experts",
    "moe_num_shared_experts",
    "moe_layer_start_index",
    "moe_layer_end_index",
    "moe_layer_interval",
    "moe_norm_min",
)
MAX_SUM_LIMIT = 1e-6  # of moe_norm_min: smaller than every sum of the scores of chosen experts
STEPS = ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step")
TOP_K = ("num_experts_per_tok", "moe_k", "top_k_experts")
UNGROUPED = "greedy"  # the value of topk_method that ignores the groups


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The experts of a model, and how a router chooses them. The names of the last six fields are those of
    kernels.ops.moe.Routing."""

    layers: tuple[bool, ...]  # whether each layer has experts; at least one has; the other layers have a dense MLP
    experts: int  # number of experts of a layer
    inner_size: int  # inner size of one expert
    shared_size: int  # inner size of the shared expert, which computes every token; 0: no shared expert
    top_k: int
    score: Score
    renormalise: bool
    scale: float
    groups: int
    top_groups: int
    group_score: GroupScore


@dataclass(frozen=True, slots=True)
class MoeFamily:
    """The fields of an architecture with experts, with the defaults of the config class in transformers."""

    names: tuple[str, ...]  # names of the field with the number of experts; several must have the same value
    experts: int | None  # None: no default
    top_k: int | None  # default of num_experts_per_tok; None: no default
    inner_name: str = "moe_intermediate_size"
    inner: int | None = None  # default of `inner_name`; None: no default
    score: Score = "softmax"
    renormalise: bool = False  # default of norm_topk_prob
    can_renormalise: bool = True  # whether norm_topk_prob may be true
    scale: float = 1.0  # default of routed_scaling_factor
    groups: int | None = 1  # default of n_group; None: no default
    top_groups: int | None = 1  # default of topk_group; None: no default
    methods: tuple[str, ...] = ("",)  # values of topk_method, the default first
    shared_inner_name: str = "shared_expert_intermediate_size"
    shared_inner: int = 0  # default of `shared_inner_name`; 0: the architecture does not have this field
    shared_name: str = "n_shared_experts"
    shared_experts: int | None = 0  # default of `shared_name`; None: no default; 0: the architecture has no such field
    dense_layers: int = 0  # default of `dense_name`, or of moe_layer_start_index
    dense_name: str = "first_k_dense_replace"
    switch: str = ""  # field that must be true for a model with experts; empty: no such field
    optional: bool = False  # whether the number of experts may be 0, which means that all layers are dense
    group_score: GroupScore = "max"


def parse_moe(fields: Fields, family: MoeFamily, num_layers: int) -> MoeConfig | None:
    """The mixture of experts; None if all layers are dense. Raises ModelRefused with the name of the wrong field."""
    if family.switch and not fields.flag(family.switch, False):
        return None
    layers = _layers(fields, family, num_layers)
    experts = _experts(fields, family)
    if not experts:
        return None
    inner = fields.integer(family.inner_name, 1, MAX_INNER, family.inner)
    top_k_name = next((name for name in TOP_K if name in fields), TOP_K[0])
    top_k = fields.integer(top_k_name, 1, MAX_EXPERTS, family.top_k)
    if top_k > experts:
        raise fields.refuse(top_k_name, f"at most the number of experts ({experts})")
    groups, top_groups = _groups(fields, family, experts, top_k)
    _check_router(fields, family)
    for name, value in CLAMPED.items():
        if fields.number(name, 0.0, 1e6, value) != value:
            raise fields.refuse(name, f"{value:g}")
    shared = _shared_size(fields, family, inner)
    renormalise = fields.flag_or_null("norm_topk_prob", family.renormalise)
    if renormalise and not family.can_renormalise:
        raise fields.refuse("norm_topk_prob", "false (transformers ignores it for this architecture)")
    scale = fields.number("routed_scaling_factor", 1e-6, 1e6, family.scale)
    if not any(layers):
        return None
    return MoeConfig(
        layers=layers,
        experts=experts,
        inner_size=inner,
        shared_size=shared,
        top_k=top_k,
        score=family.score,
        renormalise=renormalise,
        scale=scale,
        groups=groups,
        top_groups=top_groups,
        group_score=family.group_score,
    )


def _groups(fields: Fields, family: MoeFamily, experts: int, top_k: int) -> tuple[int, int]:
    """(number of groups, number of groups that a token may use)."""
    if fields.choice("topk_method", family.methods, family.methods[0]) == UNGROUPED:
        return 1, 1
    groups = fields.integer("n_group", 1, MAX_EXPERTS, family.groups)
    if experts % groups:
        raise fields.refuse("n_group", f"a divisor of the number of experts ({experts})")
    if family.group_score == "top2" and groups > 1 and experts // groups < 2:
        raise fields.refuse("n_group", f"at most half of the number of experts ({experts})")
    top_groups = fields.integer("topk_group", 1, groups, family.top_groups)
    if top_groups > groups:
        raise fields.refuse("topk_group", f"at most n_group ({groups})")
    if top_k > experts // groups * top_groups:
        raise fields.refuse("topk_group", f"larger, because a token has {top_k} experts")
    return groups, top_groups


def _check_router(fields: Fields, family: MoeFamily) -> None:
    """Refuse routers that transformers does not compute, though files name them."""
    fields.choice("scoring_func", (family.score,), family.score)
    if fields.integer("moe_layer_freq", 1, MAX_EXPERTS, 1) != 1:
        raise fields.refuse("moe_layer_freq", "1")
    fields.number("moe_norm_min", 0.0, MAX_SUM_LIMIT, 0.0)


def _experts(fields: Fields, family: MoeFamily) -> int:
    least = 0 if family.optional else 1
    counts = {name: fields.integer(name, least, MAX_EXPERTS) for name in family.names if name in fields}
    if len(set(counts.values())) > 1:
        first, *others = counts
        raise fields.refuse(others[0], f"equal to {first} ({counts[first]})")
    return next(iter(counts.values()), None) or fields.integer(family.names[0], least, MAX_EXPERTS, family.experts)


def _shared_size(fields: Fields, family: MoeFamily, inner: int) -> int:
    """The inner size of the shared expert; 0 if the architecture has none."""
    if family.shared_inner:
        return fields.integer(family.shared_inner_name, 1, MAX_INNER, family.shared_inner)
    if family.shared_experts == 0:
        return 0
    least = 0 if family.shared_name in ERNIE else 1
    return fields.integer(family.shared_name, least, MAX_EXPERTS, family.shared_experts) * inner


def _layers(fields: Fields, family: MoeFamily, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts."""
    if "mlp_layer_types" in fields:
        names = fields.texts("mlp_layer_types")
        if len(names) != num_layers or not set(names) <= {"dense", "sparse"}:
            raise fields.refuse("mlp_layer_types", f"a list of {num_layers} names, each one dense or sparse")
        return tuple(name == "sparse" for name in names)
    if "moe_layers" in fields:
        listed = fields.indices("moe_layers")
        return tuple(layer in listed for layer in range(num_layers))
    first_name = fields.either(family.dense_name, "moe_layer_start_index")
    first = fields.integer(first_name, 0, MAX_EXPERTS, family.dense_layers)
    last = fields.integer("moe_layer_end_index", -1, MAX_EXPERTS, -1)
    step_name = next((name for name in STEPS if name in fields), STEPS[0])
    step = fields.integer(step_name, 1, MAX_EXPERTS, 1)
    dense = fields.indices("mlp_only_layers")
    used = range(first, num_layers if last == -1 else last + 1)
    has_experts = []
    for layer in range(num_layers):
        has_experts.append(layer in used and layer not in dense and (layer + 1) % step == 0)
    return tuple(has_experts)
