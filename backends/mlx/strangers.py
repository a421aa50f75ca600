"""Architectures of mlx-lm that ModelConfig does not describe.

Their classes read config.json as transformers 4 spells it, and ignore unknown keys. So `arguments` adds the old
spelling. `verify` refuses by name a key that the class ignores, if transformers' config class has it with another
default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...engine.errors import ModelRefused
from ...engine.modelconfig import Rope, parse_config
from .ropes import frequencies

KINDS: Mapping[type, str] = {Llama3RoPE: "llama3", YarnRoPE: "yarn", SuScaledRoPE: "longrope"}
ROPE_TYPES = ("full_attention", "sliding_attention")
# Keys that inference does not read, or whose difference would show in the weights, which are loaded strictly.
HARMLESS = frozenset(
    "architectures dtype torch_dtype transformers_version initializer_range use_cache pretraining_tp text_config "
    "vision_config audio_config max_position_embeddings model_max_length max_window_layers router_aux_loss_coef "
    "router_jitter_noise input_jitter_noise num_nextn_predict_layers num_logits_to_keep tie_word_embeddings head_dim "
    "num_local_experts num_experts n_routed_experts num_key_value_heads qk_head_dim id2label label2id model_type "
    "layer_types sliding_window rope_parameters rope_scaling rope_theta partial_rotary_factor rope_local_base_freq "
    "quantization_config hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size is_decoder "
    "chunk_size_feed_forward output_attentions output_hidden_states output_router_logits return_dict problem_type "
    "is_encoder_decoder use_bias use_mamba_kernels mamba_chunk_size chunk_size mlp_layer_types sliding_window_pattern "
    "image_size patch_size num_channels vision_feature_layer".split()
)
HARMLESS_ENDS = (
    "_bias",
    "_dropout",
    "_pdrop",
    "_token_id",
    "_token_index",
    "_loss_coef",
    "_mlp_layer_types",
    "_name_or_path",
)


def arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys to add to config.json: rope as transformers 4 spells it, other names of a key, and defaults."""
    defaults, names = _defaults(values)
    more = {alias: values[name] for alias, name in names.items() if name in values}
    more |= {key: x for key, x in defaults.items() if isinstance(x, bool | float) and not key.startswith("_")}
    more |= _rope_arguments(values, defaults)
    more["sliding_window_pattern"] = _pattern(values.get("layer_types") or [])
    more = {key: value for key, value in more.items() if value is not None and values.get(key) is None}
    parameters = _full(values.get("rope_parameters") or {})
    if "rope_theta" in parameters:  # transformers prefers it to the key outside
        more["rope_theta"] = parameters["rope_theta"]
    if isinstance(values.get("text_config"), dict):
        more["text_config"] = {**values["text_config"], **arguments(values["text_config"])}
    return more


def _full(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rope parameters of layers with full attention."""
    return parameters.get("full_attention", parameters) or {}


def _rope_arguments(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Rope parameters as transformers 4 spells them; None: no value, whatever the default of the key."""
    parameters = values.get("rope_parameters") or {}
    usual = defaults.get("rope_parameters") or {}
    full = _full(parameters)
    local = parameters.get("sliding_attention") or usual.get("sliding_attention") or {}
    more: dict[str, Any] = {
        "rope_theta": values.get("rope_theta", _full(usual).get("rope_theta")),
        "rope_local_base_freq": local.get("rope_theta"),
    }
    if "partial_rotary_factor" in full:
        more["partial_rotary_factor"] = full["partial_rotary_factor"]
    plain = ("rope_theta", "partial_rotary_factor", "type", "rope_type", *ROPE_TYPES)
    scaling = {key: value for key, value in full.items() if key not in plain}
    if kind := _kind(full):
        more["rope_scaling"] = {**scaling, "type": kind, "rope_type": kind} if scaling or kind != "default" else None
    return more


def verify(model: nn.Module, values: Mapping[str, Any], context: int) -> None:
    """Compare a loaded model with config.json. Raises ModelRefused naming the key."""
    for table, fields in _readers(model, values):
        _verify_keys(table, fields)
    text = values["text_config"] if isinstance(values.get("text_config"), dict) else values
    _verify_windows(model, text, context)
    _verify_ropes(model, text, context)


def _pattern(kinds: Sequence[str]) -> int | None:
    """The distance of layers with full attention. `verify` refuses layers without such a pattern."""
    return kinds.index("full_attention") + 1 if "full_attention" in kinds and "sliding_attention" in kinds else None


def _kind(scaling: Mapping[str, Any]) -> str:
    return str(scaling.get("rope_type") or scaling.get("type") or ("default" if scaling else ""))


def _defaults(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Fields of transformers' config class with their defaults, and aliases of fields. Empty without a class."""
    model_type = str(values.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return {}, {}
    config = CONFIG_MAPPING[model_type]()
    return config.to_dict(), dict(config.attribute_map)


def _readers(model: nn.Module, values: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], set[str]]]:
    """Tables of config.json, and the keys that mlx-lm's class reads of each."""
    for part, table in ((model, values), (getattr(model, "language_model", None), values.get("text_config"))):
        arguments = getattr(part, "args", None)
        if table is not None and dataclasses.is_dataclass(arguments):
            yield table, {field.name for field in dataclasses.fields(arguments)}


def _verify_keys(values: Mapping[str, Any], fields: set[str]) -> None:
    defaults, names = _defaults(values)
    read = fields | {names.get(field, field) for field in fields}
    for key, default in defaults.items():
        value = values.get(key)
        harmless = key in read or key in HARMLESS or key.endswith(HARMLESS_ENDS)
        equal = value is None or value == default or _same_gelu(value, default)
        if not harmless and not equal and (value or default):
            raise _left_out(values, key, value, f"only {default!s:.50}")


def _same_gelu(value: Any, default: Any) -> bool:
    """Approximations of one function: transformers names five, and mlx-lm's classes do not follow the names."""
    return str(value).startswith("gelu") and str(default).startswith("gelu")


def _verify_windows(model: nn.Module, values: Mapping[str, Any], context: int) -> None:
    window = values.get("sliding_window")
    kinds = values.get("layer_types")
    if not window or window >= context or values.get("use_sliding_window") is False:
        return
    caches = model.make_cache() if hasattr(model, "make_cache") else [KVCache()] * len(model.layers)
    sliding = [isinstance(cache, RotatingKVCache) for cache in caches]
    if kinds is None and not any(sliding):  # the class has no windows
        raise _left_out(values, "sliding_window", window, f"none: a context of at most {window} is right")
    if kinds and len(kinds) == len(caches) and [kind == "sliding_attention" for kind in kinds] != sliding:
        raise _left_out(values, "layer_types", kinds, "another order of layers")


def _verify_ropes(model: nn.Module, values: Mapping[str, Any], context: int) -> None:
    """A plain rope must have a base of config.json. A rope with frequencies gets those of ModelConfig, with truncate,
    attention_factor and the short factors."""
    parameters = values.get("rope_scaling") or values.get("rope_parameters") or {}
    tables = [table for table in parameters.values() if isinstance(table, dict)] or [parameters]
    kinds = {kind: table for table in tables if (kind := _kind(table)) not in ("", "default", "mrope")}
    modules: list[nn.Module] = model.modules()
    ropes = [part for part in modules if isinstance(part, nn.RoPE) or type(part) in KINDS]
    custom = sum("rope" in type(part).__name__.lower() for part in modules) > len(ropes)
    present: set[str] = set()
    for part in ropes:
        kind = KINDS.get(type(part), "linear" if getattr(part, "scale", 1.0) != 1.0 else "")
        if kind in kinds:
            present.add(kind)
        if isinstance(part, nn.RoPE):
            _verify_base(part, values, tables)
        elif kind in kinds:
            _set(part, kinds[kind], values, context)
    missing = kinds.keys() - present
    if ropes and not custom and missing:
        raise _left_out(values, "the rope type", " and ".join(sorted(missing)), "plain rotation")


def _verify_base(part: nn.RoPE, values: Mapping[str, Any], tables: Sequence[Mapping[str, Any]]) -> None:
    thetas = {table.get("rope_theta", values.get("rope_theta")) for table in tables}
    thetas |= {values.get("rope_theta"), values.get("rope_local_base_freq")}
    thetas.discard(None)
    if thetas and not any(theta and abs(part.base / theta - 1) < 1e-6 for theta in thetas):
        raise _left_out(values, "rope_theta", thetas, part.base)


def _set(part: nn.Module, scaling: Mapping[str, Any], values: Mapping[str, Any], context: int) -> None:
    dims = getattr(part, "dims", None) or part.dim
    rope = _rope(scaling, dims, values)
    part._freqs = mx.array(1.0 / frequencies(rope, context))
    if isinstance(part, YarnRoPE):
        part.mscale = rope.attention_factor
    elif isinstance(part, SuScaledRoPE):  # Phi-3.5-MoE has factors of its own
        length = "long" if context > rope.original_positions else "short"
        part._scale = scaling.get(f"{length}_mscale") or rope.attention_factor


def _rope(scaling: Mapping[str, Any], dims: int, values: Mapping[str, Any]) -> Rope:
    """ModelConfig's rope of a llama whose heads rotate this number of dimensions."""
    scaling = {key: value for key, value in scaling.items() if key != "partial_rotary_factor"}
    sizes = dict.fromkeys(("hidden_size", "head_dim"), dims) | dict.fromkeys(
        ("num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"), 1
    )
    keys = ("rope_theta", "max_position_embeddings", "original_max_position_embeddings")
    shared = {key: values[key] for key in keys if values.get(key) is not None}
    return parse_config({"model_type": "llama", **sizes, **shared, "rope_parameters": scaling}).ropes["full"]


def _left_out(values: Mapping[str, Any], key: str, value: Any, instead: Any) -> ModelRefused:
    return ModelRefused(
        f"mlx-lm does not compute {values.get('model_type')} as config.json says: {key} is {value!s:.100}, but its "
        f"class has {instead!s:.100}",
        "choose another backend, or another release of mlx-lm",
    )
