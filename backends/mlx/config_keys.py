"""Checks config.json of architectures that ModelConfig does not describe.

mlx-lm's classes read the keys of transformers 4, have defaults that differ from those of transformers, and ignore
unknown keys. So `arguments` adds the defaults of transformers' config class and the keys of transformers 4. `verify`
refuses a model if mlx-lm's class ignores a key whose value is not the default; the error names the key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub.errors import StrictDataclassError
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.models.deepseek_v2 import DeepseekV2YarnRotaryEmbedding
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...engine.errors import ModelRefused
from ...engine.files.model_config import parse_config
from ...engine.files.rope_config import Rope
from .activations import set_activation
from .adapter import Windows, mix
from .ropes import frequencies

ROPE_CLASSES: Mapping[type, str] = {
    Llama3RoPE: "llama3",
    YarnRoPE: "yarn",
    DeepseekV2YarnRotaryEmbedding: "yarn",
    SuScaledRoPE: "longrope",
}
EQUAL = dict.fromkeys(("joyai_llm_flash", "kimi_k2"), "deepseek_v3")  # as deepseek_v3 in all but name
WINDOWED = ("ministral3", "mixtral", "phimoe", "starcoder2")  # a window of config.json applies to all layers
# Architectures whose classes in transformers read partial_rotary_factor for a plain rope. Others rotate whole heads.
PARTIAL = frozenset(
    "glm glm4 glm4_moe glm4_moe_lite gpt_neox laguna minimax_m2 nemotron phi phi3 solar_open stablelm".split()
)
PLAIN_ROPES = ("", "default", "mrope")  # for text, mrope equals default
SIMPLE = (bool, int, float, str, list)  # types of the values that mlx-lm's classes read
# Keys that `verify` does not compare: inference does not read them, or a wrong value fails when the weights are loaded.
HARMLESS = frozenset(
    "architectures dtype torch_dtype transformers_version initializer_range use_cache pretraining_tp text_config "
    "vision_config audio_config max_position_embeddings model_max_length max_window_layers router_aux_loss_coef "
    "router_jitter_noise input_jitter_noise num_nextn_predict_layers num_logits_to_keep tie_word_embeddings head_dim "
    "num_local_experts num_experts n_routed_experts num_key_value_heads qk_head_dim id2label label2id model_type "
    "layer_types per_layer_config vocab_size_per_layer_input sliding_window max_seq_len rope_parameters rope_scaling "
    "rope_theta partial_rotary_factor rope_local_base_freq quantization_config hidden_size intermediate_size "
    "num_hidden_layers num_attention_heads vocab_size is_decoder chunk_size_feed_forward output_attentions "
    "output_hidden_states output_router_logits return_dict problem_type is_encoder_decoder v_head_dim hidden_act "
    "hidden_activation activation_function use_bias use_mamba_kernels mamba_chunk_size chunk_size mlp_layer_types "
    "sliding_window_pattern image_size patch_size num_channels vision_feature_layer".split()
)
HARMLESS_ENDS = tuple("_bias _dropout _pdrop _token_id _token_index _loss_coef _mlp_layer_types _name_or_path".split())


class ConfigKeys:
    """The config.json of a model. Raises ValueError for a value that transformers refuses."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._complete = _complete(values)
        self.text = self._complete.get("text_config") or self._complete  # fields of the text model

    def arguments(self) -> dict[str, Any]:
        """The keys to add to config.json, or to replace in it, for mlx-lm's class."""
        more = _additions(self._values, self._complete)
        text = self._values.get("text_config")
        if isinstance(text, dict):
            more["text_config"] = {**text, **_additions(text, self.text)}
        if self._values.get("model_type") == "deepseek_v2" and self._has_plain_rope():
            more["rope_scaling"] = {"factor": 1.0}  # the class always has YaRN: with factor 1 it is the plain rope
        return more

    def verify(self, model: nn.Module, fields: set[str], context: int) -> None:
        """Compare a loaded model with config.json, and set its activation, its ropes and its window. `fields`: those
        that the class reads. Raises ModelRefused with the name of a key that differs."""
        for table in (self._values, self.text):
            _verify_keys(table, fields)
        self._verify_values()
        set_activation(model, self.text)
        self._verify_windows(model, context)
        self._verify_ropes(model, context)

    def _verify_values(self) -> None:
        """Refuse values for which a class computes something else, although it reads their keys."""
        text = self.text
        if text.get("model_type") == "phimoe" and text.get("num_experts_per_tok") != 2:
            raise _ignored(text, "num_experts_per_tok", text.get("num_experts_per_tok"), "the sparse mixer, with 2")
        full = text.get("sliding_window") and "sliding_attention" not in (text.get("layer_types") or ())
        if full and text.get("model_type") in ("exaone4", "exaone_moe"):
            raise _ignored(text, "sliding_window", text["sliding_window"], "rotations in full layers all the same")

    def _has_plain_rope(self) -> bool:
        return all(_kind(table) in PLAIN_ROPES for table in self._rope_tables())

    def _verify_windows(self, model: nn.Module, context: int) -> None:
        window = self.text.get("sliding_window")
        if not window or window >= context:
            return
        caches = make_prompt_cache(model)
        sliding = [isinstance(cache, RotatingKVCache) for cache in caches]
        kinds = self.text.get("layer_types")
        if not kinds and not any(sliding):  # the class has no windows
            if self.text.get("model_type") not in WINDOWED:
                raise _ignored(self.text, "sliding_window", window, f"none: a context of at most {window} is right")
            mix(model, Windows, window=window)
        sizes = {cache.max_size for cache in caches if isinstance(cache, RotatingKVCache)}
        if sizes - {window}:
            raise _ignored(self.text, "sliding_window", window, sizes)
        expected = [kind == "sliding_attention" for kind in kinds or ()]
        if len(expected) == len(sliding) and expected != sliding:
            raise _ignored(self.text, "layer_types", kinds, "another order of layers")

    def _verify_ropes(self, model: nn.Module, context: int) -> None:
        """Refuse a plain rope whose base is not in config.json. A scaled rope gets the frequencies that our own code
        computes: unlike mlx-lm, it supports truncate, attention_factor and the short factors."""
        scaled = {_kind(table): table for table in self._rope_tables()}
        for kind in PLAIN_ROPES:
            scaled.pop(kind, None)
        ropes = [part for part in model.modules() if _is_rope(part)]
        sizes = self._rotary_sizes() if ropes else set()
        self._verify_bases(ropes)
        for part in ropes:
            kind = _kind_of_module(part)
            if len(sizes) == 1 and isinstance(part, nn.RoPE):  # the class may ignore the size
                [part.dims] = sizes
            elif kind != "unknown" and _rotary_size(part) not in sizes:
                raise _ignored(self.text, "the rotary size", " or ".join(map(str, sizes)), _rotary_size(part))
            if kind in scaled and not isinstance(part, nn.RoPE):
                _set_frequencies(part, scaled[kind], self.text, context)
        kinds = {_kind_of_module(part) for part in ropes}
        missing = scaled.keys() - kinds
        if ropes and missing and "unknown" not in kinds:
            raise _ignored(self.text, "the rope type", " and ".join(sorted(missing)), "no rope of this type")
        always = {"yarn"} if any(isinstance(part, DeepseekV2YarnRotaryEmbedding) for part in ropes) else set()
        surplus = kinds - scaled.keys() - always - {"default", "unknown"}
        if surplus:
            raise _ignored(self.text, "the rope type", "default", f"a rope of the type {', '.join(sorted(surplus))}")

    def _verify_bases(self, ropes: Sequence[nn.Module]) -> None:
        """Refuse a base that config.json does not have, and a base of a plain rope that no module has: a class may have
        one base where config.json has one for each layer type."""
        tables = [table for table in self._rope_tables() if table.get("rope_theta")]
        local = self.text.get("rope_local_base_freq")
        thetas = {float(table["rope_theta"]) for table in tables} | ({float(local)} if local else set())
        plain = {float(table["rope_theta"]) for table in tables if _kind(table) in PLAIN_ROPES}
        bases = {float(part.base) for part in ropes if isinstance(part, nn.RoPE)}
        unknown = thetas and any(not _has(thetas, base) for base in bases)
        if unknown or (bases and any(not _has(bases, theta) for theta in plain)):
            raise _ignored(self.text, "rope_theta", thetas, ", ".join(map(str, sorted(bases))))

    def _rotary_sizes(self) -> set[int]:
        """The numbers of dimensions of a head that are rotated: one, or one for each layer type."""
        text = self.text
        if text.get("rotary_dim"):
            return {text["rotary_dim"]}
        if text.get("qk_rope_head_dim"):
            return {text["qk_rope_head_dim"]}
        head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        return {int(head * self._share(table)) for table in self._rope_tables()}

    def _share(self, table: Mapping[str, Any]) -> float:
        """The share of a head that is rotated. Raises ModelRefused for one that transformers ignores."""
        share = table.get("partial_rotary_factor")
        if share is None:
            share = self.text.get("partial_rotary_factor", 1.0)
        model_type = self.text.get("model_type")
        is_ignored = _kind(table) in PLAIN_ROPES and model_type not in PARTIAL
        if share != 1.0 and is_ignored and _config_class(self.text) is not None:
            raise ModelRefused(
                f"partial_rotary_factor of config.json is {share!s:.50}, but transformers ignores it in {model_type}",
                "delete partial_rotary_factor to rotate whole heads as transformers does",
            )
        return float(share)

    def _rope_tables(self) -> list[Mapping[str, Any]]:
        """Rope parameters: one table for all layers, or one for each layer type."""
        parameters = self.text.get("rope_parameters") or {}
        return [table for table in parameters.values() if isinstance(table, dict)] or [parameters]


def _complete(values: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as transformers 5 reads it, with all defaults. If transformers does not know the architecture, only
    rope_parameters is added."""
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
    """The keys that one table of config.json lacks, with their values. `complete` is the table with all defaults."""
    ropes = _rope_arguments(complete.get("rope_parameters") or {})
    candidates = dict(complete)
    for alias, name in _aliases(complete).items():
        candidates[alias] = complete.get(name)
    candidates |= _full_layers(complete)
    candidates["sliding_window_pattern"] = _pattern(complete.get("layer_types") or [])
    more = {key: x for key, x in candidates.items() if isinstance(x, SIMPLE)} | ropes
    missing = {key: x for key, x in more.items() if values.get(key) is None}
    if "rope_theta" in ropes:
        missing["rope_theta"] = ropes["rope_theta"]  # as in transformers, the value in rope_parameters wins
    if "rope_scaling" not in values:
        missing.setdefault("rope_scaling", None)  # some classes of mlx-lm have no default for it
    return missing


def _full_layers(complete: Mapping[str, Any]) -> dict[str, Any]:
    """The keys for Gemma 4's layers with full attention. transformers 5 writes a table for each of these layers."""
    tables = [*(complete.get("per_layer_config") or {}).values()]
    if not tables or tables != tables[:1] * len(tables):
        return {}
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    return {new: tables[0][name] for name, new in names.items() if name in tables[0]}


def _pattern(kinds: list[str]) -> int | None:
    """Every n-th layer has full attention: returns n. None if all layers are of one kind. `verify` refuses layers that
    do not follow the pattern."""
    both = {"full_attention", "sliding_attention"} <= set(kinds)
    return kinds.index("full_attention") + 1 if both else None


def _aliases(values: Mapping[str, Any]) -> Mapping[str, str]:
    """Alternative name of a key -> its name in transformers."""
    config_class = _config_class(values)
    return {} if config_class is None else config_class.attribute_map


def _config_class(values: Mapping[str, Any]) -> Any:
    """transformers' config class for this model_type; None if there is none."""
    model_type = str(values.get("model_type"))
    model_type = EQUAL.get(model_type, model_type)
    if model_type not in CONFIG_MAPPING:
        return None
    return CONFIG_MAPPING[model_type]


def _rope_arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of transformers 4 for the rope `parameters` of transformers 5, which may have one table for each layer
    type."""
    full = parameters.get("full_attention", parameters)
    local = parameters.get("sliding_attention", {})
    more = {key: full[key] for key in ("rope_theta", "partial_rotary_factor") if full.get(key) is not None}
    if local.get("rope_theta") is not None:
        more["rope_local_base_freq"] = local["rope_theta"]
    kind = _kind(full)
    scaling = {key: x for key, x in full.items() if key not in ("rope_theta", "partial_rotary_factor")}
    if kind and (kind != "default" or len(scaling) > 1):
        more["rope_scaling"] = {**scaling, "type": kind, "rope_type": kind}
    return more


def _kind(scaling: Mapping[str, Any]) -> str:
    return str(scaling.get("rope_type") or scaling.get("type") or "")


def _has(bases: Iterable[float], base: float) -> bool:
    return any(math.isclose(base, other, rel_tol=1e-6) for other in bases)


def _is_rope(part: nn.Module) -> bool:
    return type(part) in ROPE_CLASSES or "rope" in type(part).__name__.lower()


def _kind_of_module(part: nn.Module) -> str:
    if isinstance(part, nn.RoPE):
        return "default" if part.scale == 1.0 else "linear"
    return ROPE_CLASSES.get(type(part), "unknown")


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
    """Whether two values of a key mean the same. Zero, false and empty count as equal."""
    return value == default or not (value or default)


def _rotary_size(part: nn.Module) -> int:
    size: int = getattr(part, "dims", None) or getattr(part, "dim", None) or 2 * part._freqs.size
    return size


def _set_frequencies(part: nn.Module, scaling: Mapping[str, Any], text: Mapping[str, Any], context: int) -> None:
    rope = _rope(scaling, _rotary_size(part), text)
    part._freqs = mx.array(1.0 / frequencies(rope, context))
    if isinstance(part, YarnRoPE | DeepseekV2YarnRotaryEmbedding):
        part.mscale = rope.attention_factor
    elif isinstance(part, SuScaledRoPE):  # Phi-3.5-MoE has its factors in config.json
        length = "long" if context > rope.original_positions else "short"
        part._scale = scaling.get(f"{length}_mscale") or rope.attention_factor


def _rope(scaling: Mapping[str, Any], dims: int, text: Mapping[str, Any]) -> Rope:
    """The Rope record for these parameters. `parse_config` reads it from an invented Llama config, whose heads have
    `dims` dimensions."""
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
