"""Checks config.json of architectures that ModelConfig does not describe.

mlx-lm's classes read config.json as transformers 4 spells it, have defaults of their own, and ignore unknown keys. So
`arguments` adds defaults of transformers' config class and the old spelling. `verify` refuses by name a key that
mlx-lm's class ignores, if its value is not the default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub.errors import StrictDataclassError
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...engine.errors import ModelRefused
from ...engine.modelconfig import Rope, parse_config
from .ropes import frequencies

ROPE_CLASSES: Mapping[type, str] = {Llama3RoPE: "llama3", YarnRoPE: "yarn", SuScaledRoPE: "longrope"}
PLAIN_ROPES = ("", "default", "mrope")  # mrope rotates text as default does
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
HARMLESS_ENDS = tuple("_bias _dropout _pdrop _token_id _token_index _loss_coef _mlp_layer_types _name_or_path".split())


def arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys to replace in config.json. Raises ValueError for a value that transformers refuses."""
    complete = _complete(values)
    more = _additions(values, complete)
    text = values.get("text_config")
    if isinstance(text, dict):
        more["text_config"] = {**text, **_additions(text, complete["text_config"])}
    return more


def verify(model: nn.Module, values: Mapping[str, Any], context: int) -> None:
    """Compare a loaded model with config.json. Raises ModelRefused naming the key."""
    for table, fields in _readers(model, values):
        _verify_keys(table, fields)
    complete = _complete(values)
    text = complete.get("text_config") or complete
    _verify_windows(model, text, context)
    _verify_ropes(model, text, context)


def _complete(values: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as transformers 5 reads it, with all defaults. Unchanged if transformers has no such architecture."""
    config_class = _config_class(values)
    if config_class is None:
        scaling = values.get("rope_scaling") or {}
        return {"rope_parameters": {"rope_theta": values.get("rope_theta"), **scaling}, **values}
    try:
        complete: dict[str, Any] = config_class.from_dict(dict(values)).to_dict()
    except StrictDataclassError as error:
        raise ValueError(f"config.json: {error}") from error
    return complete


def _additions(values: Mapping[str, Any], complete: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of one table of config.json that are missing there."""
    simple = (bool, int, float, str, list)
    more: dict[str, Any] = {key: x for key, x in complete.items() if isinstance(x, simple)}
    more |= {alias: complete.get(name) for alias, name in _aliases(complete).items()}
    kinds = complete.get("layer_types") or []
    if {"full_attention", "sliding_attention"} <= set(kinds):
        more["sliding_window_pattern"] = kinds.index("full_attention") + 1  # `verify` refuses layers without a pattern
    ropes = _rope_arguments(complete.get("rope_parameters") or {})
    more = {key: x for key, x in (more | ropes).items() if values.get(key) is None and x is not None}
    if ropes["rope_theta"] is not None:
        more["rope_theta"] = ropes["rope_theta"]  # transformers prefers rope_parameters to the key outside
    return more


def _aliases(values: Mapping[str, Any]) -> Mapping[str, str]:
    """Other names of keys -> their names in transformers."""
    config_class = _config_class(values)
    return {} if config_class is None else config_class.attribute_map


def _config_class(values: Mapping[str, Any]) -> Any:
    """transformers' config class; None if it has no such architecture."""
    model_type = str(values.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return None
    return CONFIG_MAPPING[model_type]


def _rope_arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Rope parameters as transformers 4 spells them. They may differ by layer type. None: absent."""
    full = parameters.get("full_attention", parameters)
    local = parameters.get("sliding_attention", {})
    scaling = {key: x for key, x in full.items() if key not in ("rope_theta", "partial_rotary_factor", "type")}
    if scaling.get("rope_type", "default") == "default" and len(scaling) <= 1:
        scaling = {}
    return {
        "rope_theta": full.get("rope_theta"),
        "rope_local_base_freq": local.get("rope_theta"),
        "partial_rotary_factor": full.get("partial_rotary_factor"),
        "rope_scaling": {**scaling, "type": _kind(full), "rope_type": _kind(full)} if scaling else None,
    }


def _kind(scaling: Mapping[str, Any]) -> str:
    return str(scaling.get("rope_type") or scaling.get("type") or "")


def _readers(model: nn.Module, values: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], set[str]]]:
    """Tables of config.json, and the keys that mlx-lm's class reads of each."""
    text_model = getattr(model, "language_model", None)
    for part, table in ((model, values), (text_model, values.get("text_config"))):
        arguments = getattr(part, "args", None)
        if table is not None and dataclasses.is_dataclass(arguments):
            yield table, {field.name for field in dataclasses.fields(arguments)}


def _verify_keys(values: Mapping[str, Any], fields: set[str]) -> None:
    config_class = _config_class(values)
    if config_class is None:
        return
    aliases = _aliases(values)
    read = fields | {aliases.get(field, field) for field in fields} | HARMLESS
    for key, default in config_class().to_dict().items():
        value = values.get(key)
        ignored = key not in read and not key.endswith(HARMLESS_ENDS)
        if ignored and value is not None and not _equivalent(value, default):
            raise _ignored(values, key, value, f"only {default!s:.50}")


def _equivalent(value: Any, default: Any) -> bool:
    """Zero, false and empty are one value. So are the approximations of gelu: transformers names five, and mlx-lm's
    classes do not follow the names."""
    gelu = str(value).startswith("gelu") and str(default).startswith("gelu")
    return value == default or gelu or not (value or default)


def _verify_windows(model: nn.Module, text: Mapping[str, Any], context: int) -> None:
    window = text.get("sliding_window")
    if not window or window >= context:
        return
    sliding = [isinstance(cache, RotatingKVCache) for cache in make_prompt_cache(model)]
    kinds = text.get("layer_types")
    if kinds is None and not any(sliding):  # the class has no windows
        raise _ignored(text, "sliding_window", window, f"none: a context of at most {window} is right")
    if kinds and len(kinds) == len(sliding) and [kind == "sliding_attention" for kind in kinds] != sliding:
        raise _ignored(text, "layer_types", kinds, "another order of layers")


def _verify_ropes(model: nn.Module, text: Mapping[str, Any], context: int) -> None:
    """A plain rope must have a base of config.json. A rope with frequencies gets those of ModelConfig, which knows
    truncate, attention_factor and the short factors."""
    parameters = text.get("rope_parameters") or {}
    tables = [table for table in parameters.values() if isinstance(table, dict)] or [parameters]
    scaled = {_kind(table): table for table in tables if _kind(table) not in PLAIN_ROPES}
    modules: list[nn.Module] = model.modules()
    ropes = [part for part in modules if isinstance(part, nn.RoPE) or type(part) in ROPE_CLASSES]
    for part in ropes:
        kind = _kind_of_module(part)
        if isinstance(part, nn.RoPE):
            _verify_base(part, text, tables)
        elif kind in scaled:
            _set_frequencies(part, scaled[kind], text, context)
    unknown = sum("rope" in type(part).__name__.lower() for part in modules) > len(ropes)
    missing = scaled.keys() - {_kind_of_module(part) for part in ropes}
    if ropes and not unknown and missing:
        raise _ignored(text, "the rope type", " and ".join(sorted(missing)), "plain rotation")


def _kind_of_module(part: nn.Module) -> str:
    plain = "default" if getattr(part, "scale", 1.0) == 1.0 else "linear"
    return ROPE_CLASSES.get(type(part), plain)


def _verify_base(part: nn.RoPE, text: Mapping[str, Any], tables: Sequence[Mapping[str, Any]]) -> None:
    bases = [text.get("rope_local_base_freq"), *(table.get("rope_theta") for table in tables)]
    thetas = {float(base) for base in bases if base}
    if thetas and not any(abs(part.base / theta - 1) < 1e-6 for theta in thetas):
        raise _ignored(text, "rope_theta", thetas, part.base)


def _set_frequencies(part: nn.Module, scaling: Mapping[str, Any], text: Mapping[str, Any], context: int) -> None:
    dims = getattr(part, "dims", None) or part.dim
    rope = _rope(scaling, dims, text)
    part._freqs = mx.array(1.0 / frequencies(rope, context))
    if isinstance(part, YarnRoPE):
        part.mscale = rope.attention_factor
    elif isinstance(part, SuScaledRoPE):  # Phi-3.5-MoE names its factors in config.json
        length = "long" if context > rope.original_positions else "short"
        part._scale = scaling.get(f"{length}_mscale") or rope.attention_factor


def _rope(scaling: Mapping[str, Any], dims: int, text: Mapping[str, Any]) -> Rope:
    """The rope of ModelConfig, read from the config of a llama whose heads rotate this number of dimensions."""
    values = dict.fromkeys(("hidden_size", "head_dim"), dims) | dict.fromkeys(
        ("num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"), 1
    )
    for key in ("max_position_embeddings", "original_max_position_embeddings"):
        if text.get(key) is not None:
            values[key] = text[key]
    parameters = {key: x for key, x in scaling.items() if key != "partial_rotary_factor"}
    return parse_config({"model_type": "llama", **values, "rope_parameters": parameters}).ropes["full"]


def _ignored(values: Mapping[str, Any], key: str, value: Any, instead: Any) -> ModelRefused:
    return ModelRefused(
        f"mlx-lm does not compute {values.get('model_type')} as config.json says: {key} is {value!s:.100}, but its "
        f"class has {instead!s:.100}",
        "choose another backend, or another release of mlx-lm",
    )
