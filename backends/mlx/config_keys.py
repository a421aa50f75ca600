"""Checks config.json of architectures that ModelConfig does not describe.

mlx-lm's classes read the keys of transformers 4, have defaults that differ from those of transformers, and ignore
unknown keys. So `arguments` adds the defaults of transformers' config class and the keys of transformers 4. `verify`
refuses a model if mlx-lm's class ignores a key whose value is not the default; the error names the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.nn as nn
from huggingface_hub.errors import StrictDataclassError
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .activations import set_activation
from .adapter import Windows, mix
from .config_ropes import ConfigRopes, ignored, kind_of

EQUAL = dict.fromkeys(
    ("joyai_llm_flash", "kimi_k2"), "deepseek_v3"
)  # models that equal deepseek_v3 except for the model_type
WINDOWED = ("ministral3", "mixtral", "phimoe", "starcoder2")  # a window of config.json applies to all layers
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
        self._ropes = ConfigRopes(self.text, _config_class(self.text) is not None)

    def arguments(self) -> dict[str, Any]:
        """The keys to add to config.json, or to replace in it, for mlx-lm's class."""
        more = _additions(self._values, self._complete)
        text = self._values.get("text_config")
        if isinstance(text, dict):
            more["text_config"] = {**text, **_additions(text, self.text)}
        if self._values.get("model_type") == "deepseek_v2" and self._ropes.is_plain:
            more["rope_scaling"] = {"factor": 1.0}  # the class always has YaRN: with factor 1 it is the plain rope
        return more

    def verify(self, model: nn.Module, fields: set[str], context: int) -> None:
        """Compare a loaded model with config.json, and set its activation, its ropes and its window. `fields`: those
        that the class reads. Raises ModelRefused with the name of a key that differs."""
        for table in (self._values, self.text):
            _verify_keys(table, fields)
        self._verify_values()
        set_activation(model, self.text)
        window = self.text.get("sliding_window")
        if window and window < context:
            self._verify_windows(model, window)
        self._ropes.verify(model, context)

    def _verify_values(self) -> None:
        """Refuse values for which a class computes something else, although it reads their keys."""
        text = self.text
        if text.get("model_type") == "phimoe" and text.get("num_experts_per_tok") != 2:
            raise ignored(text, "num_experts_per_tok", text.get("num_experts_per_tok"), "the sparse mixer, with 2")
        full = text.get("sliding_window") and "sliding_attention" not in (text.get("layer_types") or ())
        if full and text.get("model_type") in ("exaone4", "exaone_moe"):
            raise ignored(text, "sliding_window", text["sliding_window"], "rotations in full layers all the same")

    def _verify_windows(self, model: nn.Module, window: int) -> None:
        caches = make_prompt_cache(model)
        sliding = [isinstance(cache, RotatingKVCache) for cache in caches]
        kinds = self.text.get("layer_types")
        if not kinds and not any(sliding):  # the class has no windows
            if self.text.get("model_type") not in WINDOWED:
                raise ignored(self.text, "sliding_window", window, f"none: a context of at most {window} is right")
            mix(model, Windows, window=window)
        sizes = {cache.max_size for cache in caches if isinstance(cache, RotatingKVCache)}
        if sizes - {window}:
            raise ignored(self.text, "sliding_window", window, sizes)
        expected = [kind == "sliding_attention" for kind in kinds or ()]
        if len(expected) == len(sliding) and expected != sliding:
            raise ignored(self.text, "layer_types", kinds, "another order of layers")


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
    kind = kind_of(full)
    scaling = {key: x for key, x in full.items() if key not in ("rope_theta", "partial_rotary_factor")}
    if kind and (kind != "default" or len(scaling) > 1):
        more["rope_scaling"] = {**scaling, "type": kind, "rope_type": kind}
    return more


def _verify_keys(values: Mapping[str, Any], fields: set[str]) -> None:
    config_class = _config_class(values)
    if config_class is None:
        return
    aliases = _aliases(values)
    read = fields | {aliases.get(field, field) for field in fields} | HARMLESS
    for key, default in config_class().to_dict().items():
        value = values.get(key)
        is_ignored = key not in read and not key.endswith(HARMLESS_ENDS)
        if is_ignored and value is not None and not _equivalent(value, default):
            raise ignored(values, key, value, f"only {default!s:.50}")


def _equivalent(value: Any, default: Any) -> bool:
    """Whether two values of a key mean the same. Zero, false and empty count as equal."""
    return value == default or not (value or default)
