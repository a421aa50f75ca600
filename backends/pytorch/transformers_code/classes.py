"""The class in transformers that computes a model, from its config.json. Runs no code of the model's folder."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
import transformers
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from ....engine.errors import ModelRefused

# A load prints nothing.
logging.set_verbosity_error()  # type: ignore[no-untyped-call]
logging.disable_progress_bar()  # type: ignore[no-untyped-call]

EXPERTS = "batched_mm"  # the experts of transformers whose shapes do not depend on the choice of experts
# Fields that other parts of localllm read.
_OTHER_FIELDS = ("quantization_config", "compression_config", "auto_map", "torch_dtype", "dtype")
# Ropes whose frequencies change with the longest position of a step: rows of one step would change each other.
_LAYERS = ("full_attention", "sliding_attention")  # the kinds of layers that the cache supports
_CHANGING_ROPES = ("dynamic", "longrope")


def refused(model_type: str, reason: str) -> ModelRefused:
    """The refusal of a model that transformers' code cannot compute over our cache."""
    return ModelRefused(f"transformers' code of {model_type:.50} is not supported: {reason}")


def config_of(values: Mapping[str, Any]) -> Any:
    """The configuration of a model with the config.json `values`. Raises ModelRefused."""
    model_type = str(values.get("model_type"))
    if model_type not in CONFIG_MAPPING or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        code = "; the code in its folder is never run" if values.get("auto_map") else ""
        raise refused(model_type, f"transformers {transformers.__version__} has no causal decoder of this name{code}")
    known = {key: value for key, value in values.items() if key not in _OTHER_FIELDS}
    try:
        config = CONFIG_MAPPING[model_type].from_dict(known)
    except Exception as error:  # each class validates its fields in its own way
        raise refused(model_type, f"config.json: {error!s:.300}") from error
    _check_ropes(model_type, config)
    _check_layers(model_type, config)
    config.use_cache = False
    return config


def _check_layers(model_type: str, config: Any) -> None:
    if any(f"{part}_config" in config.to_dict() for part in ("vision", "audio", "encoder", "text")):
        raise refused(model_type, "it is a multimodal model")
    if getattr(config, "is_encoder_decoder", False):
        raise refused(model_type, "it is an encoder and a decoder")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYERS))
    if others:
        raise refused(model_type, f"it has layers of the kind {others[0]:.50}")
    if causal_class(model_type)._is_stateful:
        raise refused(model_type, "its layers keep a state besides keys and values")


def _check_ropes(model_type: str, config: Any) -> None:
    ropes = getattr(config, "rope_parameters", None) or {}
    tables = [ropes, *(table for table in ropes.values() if isinstance(table, dict))]
    kinds = {table.get("rope_type", table.get("type")) for table in tables}
    for kind in _CHANGING_ROPES:
        if kind in kinds:
            raise refused(model_type, f"a rope of the type {kind} depends on the longest row of a step")


def causal_class(model_type: str) -> Any:
    """The class of a causal language model."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def skeleton(config: Any, attention: str, device: str = "cpu") -> Any:
    """The model without values of its parameters: they are on the device meta. Its buffers are on `device`.
    `attention`: the name of its attention in transformers' interface."""
    config = deepcopy(config)
    config._attn_implementation = attention
    config._experts_implementation = EXPERTS
    register: Any = torch.nn.Module.register_parameter

    def register_on_meta(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = torch.nn.Parameter(param.to("meta"), requires_grad=False)
        register(module, name, param)

    with patch.object(torch.nn.Module, "register_parameter", register_on_meta):
        with no_init_weights(), torch.device(device):
            model = causal_class(config.model_type)(config)
    return model.eval()
