"""The names of tensors in the files of a language model -> the names that its decoder reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from ..errors import ModelRefused
from .families import FAMILIES
from .model_config import ModelConfig
from .multimodal import PARTS

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_HEAD_BIAS = "lm_head.bias"  # no architecture in FAMILIES has it
Tensor = TypeVar("Tensor")

_MODEL = "model."
_WRAPPED = ("model.model.", "model.lm_head.")  # a trainer saved the language model as a part of another module
_BARE = ("embed_tokens.", "layers.", "norm.", "rotary_emb.")  # the language model was saved without its output head
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Buffers of old exporters: the model computes them from config.json.
_DERIVED = re.compile(r"\.rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$")
# Causal masks, numbers of positions, scales of a quantised KV cache.
_BUFFERS = re.compile(r"\.(masked_bias|self_attn\.bias|position_ids|[kv]_scale)$")
_OTHER_PARTS = re.compile(rf"model\.({'|'.join((*PARTS, 'image_newline', 'mtp'))})\b")
_KEY_VALUE = re.compile(r"\.self_attn\.([kv]_proj|[kv]_norm)\.")
_FACTORS = re.compile(r"lora_|\bbase_model\.")  # of adapters: they change the logits


def names_of_language_model(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with the names that a causal language model has: as in transformers, one prefix `model.` is removed
    or added where the files lack it or have it twice. Raises ModelRefused if two tensors get one name."""
    sources: dict[str, str] = {}
    for name in tensors:
        other = sources.setdefault(_name(name), name)
        if other != name:
            raise ModelRefused(f"{other!r:.200} and {name!r:.200} are the same tensor of the model")
    return {name: tensors[source] for name, source in sources.items()}


def _name(name: str) -> str:
    if name.startswith(_WRAPPED):
        return name.removeprefix(_MODEL)
    return _MODEL + name if name.startswith(_BARE) else name


def decoder_tensors(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The tensors that the decoder may read: without other parts of a model, and without layers after the last one.

    A tied model that has only an output head uses it as the embedding. Of an architecture that is not in FAMILIES only
    the number of layers is known.
    """
    if config.model_type not in FAMILIES:
        layers = config.num_layers
        return {name: tensor for name, tensor in tensors.items() if not (layers and _is_extra(name, layers))}
    kept = {name: tensor for name, tensor in tensors.items() if not _is_unused(name, config.num_layers)}
    kept = {name: tensor for name, tensor in kept.items() if not _is_of_shared_cache(name, config.cached_layers)}
    if config.tie_embeddings and HEAD in kept and EMBEDDING not in kept:
        kept[EMBEDDING] = kept.pop(HEAD)
    return kept


def _is_unused(name: str, num_layers: int) -> bool:
    if _DERIVED.search(name) or _BUFFERS.search(name) or _is_extra(name, num_layers):
        return True
    if name.startswith((_MODEL, "lm_head.")):
        return name == _HEAD_BIAS or bool(_OTHER_PARTS.match(name))
    return not _FACTORS.search(name)


def _is_of_shared_cache(name: str, cached_layers: int) -> bool:
    """Whether the tensor makes keys or values of a layer that reads the cache of another layer."""
    return bool(_KEY_VALUE.search(name)) and _is_extra(name, cached_layers)


def _is_extra(name: str, num_layers: int) -> bool:
    """Whether the tensor is one of a layer after the last one."""
    layer = _LAYER.match(name)
    return layer is not None and int(layer[1]) >= num_layers


def unused_warnings(names: Iterable[str], config: ModelConfig) -> list[str]:
    """Warnings about the tensors that decoder_tensors leaves out of `names`. Buffers that the model computes need none.
    Nor does the layer after the last one in an architecture where it predicts several tokens at a time."""
    if config.model_type not in FAMILIES:
        return []
    layers = config.num_layers
    others = sorted(name for name in names if _is_unused(name, layers) and not _DERIVED.search(name))
    predicting = layers + 1 if FAMILIES[config.model_type].predicts else layers
    extra = [name for name in others if _is_extra(name, predicting)]
    others = [name for name in others if not _is_extra(name, layers)]
    warnings = []
    if extra:
        warnings.append(f"{listed(extra)}: not used, because num_hidden_layers is {layers}")
    if others:
        warnings.append(f"{listed(others)}: not used, because the decoder of {config.model_type} has no such tensor")
    return warnings


def listed(names: Sequence[str]) -> str:
    """The first name and the number of the others, for a warning."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"tensor {names[0]!r:.200}{more}"
