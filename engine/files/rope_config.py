"""The fields of config.json that describe rotary position embeddings -> Rope, validated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from ..errors import ModelRefused
from .families import ATTENTION, Family, LayerKind
from .fields import Fields
from .layer_kinds import FULL, RECURRENT, SLIDING


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of one kind of layer. The names are those of the papers and config.json."""

    kind: Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]
    theta: float
    rotary_dim: int  # rotated dimensions per head, even
    factor: float = 1.0
    rotated_pairs: int = 0  # proportional: the other pairs have the frequency 0
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
class QueryScaling:
    """Factors of the queries, as in Llama 4: 1 + beta * log(1 + floor((position + offset) / positions))."""

    beta: float
    positions: int  # below this position (plus the offset) the factor is 1
    offset: int = 0
    only_without_rope: bool = False  # whether only layers without a rope have the factors


def parse_ropes(
    fields: Fields,
    family: Family,
    kinds: tuple[LayerKind, ...],
    head_dims: Mapping[LayerKind, int],
    positions: int,
) -> Mapping[LayerKind, Rope]:
    """The rope of each kind of layer. `head_dims`: dimension of a head in each kind.

    transformers 5 writes rope_parameters: one table, or one for each layer type if they differ. transformers 4 wrote
    rope_theta and rope_scaling. For Gemma 3 it also wrote rope_local_base_freq for sliding layers, to which
    rope_scaling does not apply.
    """
    tables = _tables_by_kind(fields, family) if family.ropes_by_kind else shared_table(fields, family)
    ropes: dict[LayerKind, Rope] = {}
    for kind in dict.fromkeys(kind for kind in kinds if kind != RECURRENT):
        theta = _theta(fields, family, tables[kind], kind)
        ropes[kind] = _rope(fields, family, tables[kind], theta, head_dims[kind], positions)
    return MappingProxyType(ropes)


def _theta(fields: Fields, family: Family, table: Fields, kind: LayerKind) -> float:
    """The base of the frequencies: that of the table, or else of a field beside the table."""
    if "rope_theta" in table:
        return table.number("rope_theta", 1.0, 1e15)
    if family.ropes_by_kind and kind == SLIDING:
        return (
            fields.number("rope_local_base_freq", 1.0, 1e15, family.local_theta) if family.local_theta else family.theta
        )
    return fields.number("rope_theta", 1.0, 1e15, family.theta)


def parse_query_scaling(fields: Fields, family: Family, ropes: Mapping[LayerKind, Rope]) -> QueryScaling | None:
    """The factors of the queries; None if the architecture has none, or if they are all 1. Raises ModelRefused."""
    if family.chunked and fields.flag("attn_temperature_tuning", True):
        beta = fields.number("attn_scale", 0.0, 1e3, 0.1)
        positions = fields.integer("floor_scale", 1, 2**27, 8192)
        return QueryScaling(beta, positions, offset=1, only_without_rope=True)
    if not family.query_scaling:
        return None
    table = shared_table(fields, family)[FULL]
    beta = table.number("llama_4_scaling_beta", 0.0, 1e3)
    [rope] = set(ropes.values())
    positions = rope.original_positions or table.integer("original_max_position_embeddings", 1, 2**27)
    return QueryScaling(beta, positions) if beta else None


def shared_table(fields: Fields, family: Family) -> dict[LayerKind, Fields]:
    """The rope table of an architecture with one rope for all layers."""
    table = fields.table("rope_scaling")
    if not table:
        table = fields.table("rope_parameters")
    if not table and family.rope and "rope_parameters" in fields:
        raise fields.refuse("rope_parameters", "absent, or an object with the fields of a rope")
    if not table:
        table = Fields(family.rope or {}, "config.json: rope_parameters")
    for name in ATTENTION:
        if name in table:
            raise table.refuse(name, "absent (this architecture has one rope for all layers)")
    return dict.fromkeys(ATTENTION.values(), table)


def _tables_by_kind(fields: Fields, family: Family) -> dict[LayerKind, Fields]:
    """The rope tables of an architecture with a rope for each kind of layer."""
    parameters = fields.table("rope_parameters")
    if not parameters and family.rope:
        parameters = Fields(family.rope, "config.json: rope_parameters")
    for name in parameters:
        if name not in ATTENTION:
            parameters.warn(
                name, f"ignored, as by transformers, because it is not inside one of {', '.join(ATTENTION)}"
            )
    older = Fields({}, "") if family.rope else fields.table("rope_scaling")
    if older.either("rope_type", "type") == "type":
        raise older.refuse(
            "type", "renamed to rope_type (releases of transformers disagree on `type` for this architecture)"
        )
    tables = {kind: parameters.table(name) for name, kind in ATTENTION.items()}
    tables["full"] = tables["full"].updated(older)
    for table in tables.values():
        if not table.flag("truncate", True):
            raise table.refuse("truncate", "true (transformers supports no other value for this architecture)")
    return tables


def _rope(fields: Fields, family: Family, table: Fields, theta: float, head_dim: int, positions: int) -> Rope:
    """The rope of one table. `positions`: the default of original_max_position_embeddings."""
    kind = table.text(table.either("rope_type", "type"), "default")
    kind = family.rope_names.get(kind, kind)
    if kind not in family.rope_kinds:
        raise ModelRefused(
            f"config.json: rope type {kind!r:.50} is not supported",
            f"supported: {', '.join(family.rope_kinds)}",
        )
    if kind == "proportional":
        share = table.number("partial_rotary_factor", 0.0, 1.0, 1.0)
        factor = table.number("factor", 1e-3, 1e6, 1.0)
        return Rope("proportional", theta, _even(head_dim), factor, rotated_pairs=int(share * head_dim // 2))
    rope = Rope("default", theta, _rotary_dim(fields, family, table, kind, head_dim))
    if kind == "default":
        return rope
    if kind == "dynamic" and family.rope_alpha and "alpha" in table:
        dim = rope.rotary_dim
        return replace(rope, theta=theta * table.number("alpha", 1e-3, 1e6) ** (dim / (dim - 2)))
    if kind == "dynamic":
        table.number("factor", 1e-3, 1e6)
        context = f"within the context of {positions} tokens, which localllm does not extend"
        table.warn(table.either("rope_type", "type"), f"without effect {context}")
        return rope
    original = _original_positions(fields, family, table, positions)
    return _SCALED_ROPES[kind](rope, table, original, positions)


def _original_positions(fields: Fields, family: Family, table: Fields, positions: int) -> int:
    """The context length of the original training. The field at the top level of config.json overrides that of the
    table. Phi-3 always has it at the top level."""
    key = "original_max_position_embeddings"
    if family.ropes_by_kind or (key not in fields and not family.original_positions):
        return table.integer(key, 1, 2**27, positions)
    return fields.integer(key, 1, 2**27, family.original_positions)


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
        truncate=table.flag_or_null("truncate", True),
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


def _rotary_dim(fields: Fields, family: Family, table: Fields, kind: str, head_dim: int) -> int:
    """The number of rotated dimensions per head.

    For most architectures transformers accepts partial_rotary_factor, but does not support it: the default rope type
    ignores it, and the attention fails with a scaled rope type. Such a model is refused.
    """
    if kind == "default" and not family.partial_rotary:
        return _even(head_dim)
    source = table if "partial_rotary_factor" in table else fields
    default = fields.integer("rotary_dim", 2, head_dim, int(head_dim * family.rotary_share)) / head_dim
    dim = int(head_dim * source.number("partial_rotary_factor", 1e-3, 1.0, default))
    if dim != head_dim and not family.partial_rotary:
        raise source.refuse("partial_rotary_factor", f"1 (rope type {kind} of this architecture needs it)")
    return _even(dim)


def _even(dim: int) -> int:
    if dim < 2 or dim % 2:
        raise ModelRefused(f"config.json: the rotary dimensions per head must be an even number, not {dim}")
    return dim
