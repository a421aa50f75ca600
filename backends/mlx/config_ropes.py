"""Checks the ropes of a model of mlx-lm against config.json, and gives scaled ropes their frequencies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.deepseek_v2 import DeepseekV2YarnRotaryEmbedding
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE

from ...engine.errors import ModelRefused
from ...engine.files.model_config import parse_config
from ...engine.files.rope_config import Rope
from .ropes import frequencies

CLASSES: Mapping[type, str] = {
    Llama3RoPE: "llama3",
    YarnRoPE: "yarn",
    DeepseekV2YarnRotaryEmbedding: "yarn",
    SuScaledRoPE: "longrope",
}
# Architectures whose classes in transformers read partial_rotary_factor for a plain rope. Others rotate whole heads.
PARTIAL = frozenset(
    "glm glm4 glm4_moe glm4_moe_lite gpt_neox laguna minimax_m2 nemotron phi phi3 solar_open stablelm".split()
)
PLAIN = frozenset({"", "default", "mrope"})  # for text, mrope equals default


class ConfigRopes:
    """The ropes of a config.json as transformers 5 reads it."""

    def __init__(self, text: Mapping[str, Any], known: bool) -> None:
        """`text`: the fields of the text model, with all defaults. `known`: whether transformers has its class."""
        parameters = text.get("rope_parameters") or {}
        by_layer_type: list[Mapping[str, Any]] = [table for table in parameters.values() if isinstance(table, dict)]
        self._text = text
        self._known = known
        self._tables = by_layer_type or [parameters]
        self._scaled = {kind_of(table): table for table in self._tables if kind_of(table) not in PLAIN}

    @property
    def is_plain(self) -> bool:
        return not self._scaled

    def verify(self, model: nn.Module, context: int) -> None:
        """Refuse a plain rope whose base is not in config.json. A scaled rope gets the frequencies that our own code
        computes: unlike mlx-lm, it supports truncate, attention_factor and the short factors."""
        ropes = [part for part in model.modules() if _is_rope(part)]
        if not ropes:
            return
        self._verify_bases([float(rope.base) for rope in ropes if isinstance(rope, nn.RoPE)])
        sizes = self._rotary_sizes()
        for rope in ropes:
            self._set_size(rope, sizes)
            kind = _kind_of_module(rope)
            if kind in self._scaled and not isinstance(rope, nn.RoPE):
                _set_frequencies(rope, self._scaled[kind], self._text, context)
        self._verify_kinds(ropes)

    def _verify_bases(self, bases: Sequence[float]) -> None:
        """Refuse a base that config.json does not have, and a base of a plain rope that no module has: a class may have
        one base where config.json has one for each layer type."""
        tables = [table for table in self._tables if table.get("rope_theta")]
        plain = {float(table["rope_theta"]) for table in tables if kind_of(table) in PLAIN}
        thetas = {float(table["rope_theta"]) for table in tables}
        thetas |= {float(self._text.get("rope_local_base_freq") or 0.0)} - {0.0}
        is_right = _contains(thetas or bases, bases) and _contains(bases or plain, plain)
        if not is_right:
            raise ignored(self._text, "rope_theta", thetas, ", ".join(map(str, sorted({*bases}))))

    def _set_size(self, rope: nn.Module, sizes: set[int]) -> None:
        """Set the number of dimensions of a plain rope: its class may ignore it. Refuse another rope of a wrong one."""
        if len(sizes) == 1 and isinstance(rope, nn.RoPE):
            [rope.dims] = sizes
        elif _kind_of_module(rope) != "unknown" and _rotary_size(rope) not in sizes:
            raise ignored(self._text, "the rotary size", " or ".join(map(str, sizes)), _rotary_size(rope))

    def _verify_kinds(self, ropes: Sequence[nn.Module]) -> None:
        kinds = {_kind_of_module(rope) for rope in ropes}
        missing = self._scaled.keys() - kinds
        if missing and "unknown" not in kinds:
            raise ignored(self._text, "the rope type", " and ".join(sorted(missing)), "no rope of this type")
        surplus = kinds - self._scaled.keys() - {"default", "unknown"}
        if any(isinstance(rope, DeepseekV2YarnRotaryEmbedding) for rope in ropes):
            surplus -= {"yarn"}  # the class always has it
        if surplus:
            raise ignored(self._text, "the rope type", "default", f"a rope of the type {', '.join(sorted(surplus))}")

    def _rotary_sizes(self) -> set[int]:
        """The numbers of dimensions of a head that are rotated: one, or one for each layer type."""
        text = self._text
        fixed = text.get("rotary_dim") or text.get("qk_rope_head_dim")
        if fixed:
            return {fixed}
        head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        return {int(head * self._share(table)) for table in self._tables}

    def _share(self, table: Mapping[str, Any]) -> float:
        """The share of a head that is rotated. Raises ModelRefused for one that transformers ignores."""
        share = table.get("partial_rotary_factor")
        if share is None:
            share = self._text.get("partial_rotary_factor", 1.0)
        model_type = self._text.get("model_type")
        is_ignored = self._known and kind_of(table) in PLAIN and model_type not in PARTIAL
        if is_ignored and share != 1.0:
            raise ModelRefused(
                f"partial_rotary_factor of config.json is {share!s:.50}, but transformers ignores it in {model_type}",
                "delete partial_rotary_factor to rotate whole heads as transformers does",
            )
        return float(share)


def kind_of(table: Mapping[str, Any]) -> str:
    """The rope type of a table; empty if it has none."""
    return str(table.get("rope_type") or table.get("type") or "")


def ignored(values: Mapping[str, Any], key: str, value: Any, instead: Any) -> ModelRefused:
    """The error for a key of config.json that the class of mlx-lm does not compute."""
    return ModelRefused(
        f"mlx-lm does not compute {values.get('model_type')} as config.json says: {key} is {value!s:.100}, but its "
        f"class has {instead!s:.100}",
        "choose another backend, or another release of mlx-lm",
    )


def _contains(bases: Iterable[float], expected: Iterable[float]) -> bool:
    """Whether each of the expected bases is one of `bases`."""
    return all(any(math.isclose(base, other, rel_tol=1e-6) for other in bases) for base in expected)


def _is_rope(part: nn.Module) -> bool:
    return type(part) in CLASSES or "rope" in type(part).__name__.lower()


def _kind_of_module(part: nn.Module) -> str:
    if isinstance(part, nn.RoPE):
        return "default" if part.scale == 1.0 else "linear"
    return CLASSES.get(type(part), "unknown")


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
    ones = dict.fromkeys(("num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"), 1)
    limits = {
        key: text[key]
        for key in ("max_position_embeddings", "original_max_position_embeddings")
        if text.get(key) is not None
    }
    parameters = {key: value for key, value in scaling.items() if key != "partial_rotary_factor"}
    values = {"model_type": "llama", "hidden_size": dims, "head_dim": dims, **ones, **limits}
    return parse_config({**values, "rope_parameters": parameters}).ropes["full"]
