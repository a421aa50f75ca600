"""The text model of a multimodal model: its fields of config.json and its tensors. The other parts are not loaded."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from ..errors import ModelRefused
from .fields import Fields

Tensor = TypeVar("Tensor")

# model_type of a multimodal model -> the supported values of model_type in its text_config
TEXT_MODELS: Mapping[str, tuple[str, ...]] = MappingProxyType({"mistral3": ("ministral3", "mistral")})

# Fields that a file may have beside text_config. As in transformers, that value has precedence over text_config.
_SHARED = ("quantization_config", "dtype", "torch_dtype", "eos_token_id")
# The output head is a part of the multimodal model: transformers 5 ignores this field in text_config, but writes it.
TIE = "tie_word_embeddings"
# Beginning of a tensor's name -> that of the text model's name. transformers 4 and 5 write different names.
_TEXT_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))
_OTHER_PREFIXES = tuple(
    f"{prefix}{part}." for prefix in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
)


def text_values(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The config.json of the text model in the config.json of a multimodal model. Raises ModelRefused for a text model
    that is not in TEXT_MODELS, and for a wrong value of TIE."""
    fields = Fields(values, where)
    text = fields.table("text_config")
    if not text:
        raise fields.refuse("text_config", "an object")
    supported = TEXT_MODELS[fields.text("model_type")]
    if text.get("model_type") not in supported:
        raise text.refuse("model_type", " or ".join(supported))
    merged: dict[str, Any] = dict(values["text_config"])
    for key in _SHARED:
        if key in fields:
            merged[key] = values[key]
    merged[TIE] = fields.flag(TIE, True)
    return merged


def text_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the text model, with the names that they have in files of the text model alone. Raises
    ModelRefused if two tensors get the same name."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(_OTHER_PREFIXES):
            continue
        text_name = _text_name(name)
        if text_name in renamed:
            raise ModelRefused(f"two tensors of the model are {text_name!r:.200} of its text model")
        renamed[text_name] = tensor
    return renamed


def _text_name(name: str) -> str:
    for prefix, replacement in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name
