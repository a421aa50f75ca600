"""The text model of a multimodal model: its fields of config.json and its tensors. The other parts are not loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from ..errors import ModelRefused
from .fields import Fields

Tensor = TypeVar("Tensor")


@dataclass(frozen=True, slots=True)
class Multimodal:
    """The text model of a multimodal architecture in config.json."""

    texts: tuple[str, ...]  # the supported values of model_type in text_config
    tied: bool  # default of tie_word_embeddings
    # True: published files may have the fields of the text model beside vision_config, without text_config. Then also
    # tie_word_embeddings in text_config ties the head.
    flat: bool = False


# model_type of a multimodal model -> its text model
TEXT_MODELS: Mapping[str, Multimodal] = MappingProxyType(
    {
        "gemma3": Multimodal(("gemma3_text",), tied=True),
        "gemma4": Multimodal(("gemma4_text",), tied=True),
        "kimi_k25": Multimodal(("kimi_k2", "deepseek_v3"), tied=True),
        "llama4": Multimodal(("llama4_text",), tied=False),
        "mistral3": Multimodal(("ministral3", "mistral"), tied=True),
        "qwen2_5_vl": Multimodal(("qwen2_5_vl_text",), tied=False, flat=True),
        "qwen2_vl": Multimodal(("qwen2_vl_text",), tied=False, flat=True),
        "qwen3_5": Multimodal(("qwen3_5_text",), tied=False),
        "qwen3_5_moe": Multimodal(("qwen3_5_moe_text",), tied=False),
        "qwen3_vl": Multimodal(("qwen3_vl_text",), tied=False),
        "qwen3_vl_moe": Multimodal(("qwen3_vl_moe_text",), tied=False),
    }
)
# Names of the modules of a multimodal model that read no text.
PARTS = (
    "vision_tower",
    "vision_model",
    "visual",
    "multi_modal_projector",
    "mm_projector",
    "audio_tower",
    "embed_vision",
    "embed_audio",
)

# Fields that a file may have beside text_config. As in transformers, that value has precedence over text_config.
_SHARED = ("quantization_config", "dtype", "torch_dtype", "eos_token_id")
# The output head is a part of the multimodal model: transformers 5 ignores this field in text_config, but writes it.
TIE = "tie_word_embeddings"
# Beginning of a tensor's name -> that of the text model's name. transformers 4 and 5 write different names.
_TEXT_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))
_OTHER_PART = re.compile(rf"(?:model\.)?({'|'.join(PARTS)})\.")


def text_values(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The config.json of the text model in the config.json of a multimodal model. Raises ModelRefused for a text model
    that is not in TEXT_MODELS, and for a wrong value of TIE."""
    fields = Fields(values, where)
    multimodal = TEXT_MODELS[fields.text("model_type")]
    text = fields.table("text_config")
    if multimodal.flat and not text:
        return {**values, "model_type": multimodal.texts[0]}
    if not text:
        raise fields.refuse("text_config", "an object")
    if text.get("model_type") not in multimodal.texts:
        raise text.refuse("model_type", " or ".join(multimodal.texts))
    merged: dict[str, Any] = dict(values["text_config"])
    for key in _SHARED:
        if key in fields:
            merged[key] = values[key]
    is_tied = fields.flag(TIE, multimodal.tied)
    merged[TIE] = is_tied or (multimodal.flat and text.flag(TIE, False))
    return merged


def text_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the text model, with the names that they have in files of the text model alone. Raises
    ModelRefused if two tensors get the same name."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if _OTHER_PART.match(name):
            continue
        text_name = _text_name(name)
        if text_name in renamed:
            raise ModelRefused(f"two tensors of the model are {text_name!r:.200} of its text model")
        renamed[text_name] = tensor
    return renamed


def other_parts(names: Iterable[str]) -> list[str]:
    """The modules that read no text, by the names of the tensors of a multimodal model."""
    return sorted({part[1] for part in map(_OTHER_PART.match, names) if part})


def _text_name(name: str) -> str:
    for prefix, replacement in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name
