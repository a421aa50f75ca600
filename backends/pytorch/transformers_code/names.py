"""The names of tensors in a model's files -> the names of transformers' code, as from_pretrained maps them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

from ....engine.files.tensor_files import StoredTensor
from ....engine.files.tensor_names import listed
from ..quant.floats import STORED
from ..weights import Weights

# Buffers of old exporters: the model computes them from config.json.
_DERIVED = re.compile(r"(rotary_emb\.(inv_freq|\w+_cached)|\.masked_bias|\.attn\.bias|\.attention\.bias)$")


_LAYER = re.compile(r"(?:\w+\.)*?(?:layers|h)\.(\d+)\.")
# Ends of the names of tensors that a quantised weight has instead of "weight".
_QUANTISED = frozenset(
    "qweight qzeros scales g_idx weight_packed weight_scale weight_shape weight_zero_point weight_g_idx "
    "weight_scale_inv weight_offset input_scale input_offset quant_bias deq_scale blocks".split()
)


@dataclass(frozen=True)
class Conversion:
    """Tensors of the files that become parameters of other shapes."""

    converter: WeightConverter
    sources: dict[str, list[str]]  # pattern of the converter -> names of tensors, in order

    def experts(self) -> list[list[str]] | None:
        """For each expert the names of its projections without ".weight"; None: the conversion does more than to
        concatenate them."""
        stack, *others = self.converter.operations
        plain = isinstance(stack, MergeModulelist) and all(isinstance(each, Concatenate) for each in others)
        columns = [self.sources.get(pattern, []) for pattern in self.converter.source_patterns]
        names = [list(names) for names in zip(*columns, strict=False)]
        if not plain or len({len(column) for column in columns}) != 1:
            return None
        return [[name.removesuffix(".weight") for name in expert] for expert in names]

    def parameters(self, weights: Weights, target: str, config: Any) -> dict[str, Tensor]:
        """The converted parameters. Reads all sources to main memory."""
        converter = deepcopy(self.converter)
        collected: dict[str, Any] = converter.collected_tensors
        for pattern, names in self.sources.items():
            shapes = map(weights.tensors.shape, names)
            collected[pattern] = [
                weights.tensors.read(name, shape, STORED).clone() for name, shape in zip(names, shapes, strict=True)
            ]
        values = converter.convert(target, config=config)
        return {name: value[0] if isinstance(value, list) else value for name, value in values.items()}


@dataclass(frozen=True)
class Names:
    """The tensors of a model's files under the names of transformers' code."""

    tensors: Mapping[str, StoredTensor]
    conversions: Mapping[str, Conversion]  # name of the first parameter -> its conversion
    warnings: tuple[str, ...]


class _Target(NamedTuple):
    """The name of a tensor in transformers' code."""

    parameter: str  # the first parameter that gets its values
    own: str  # the name without a conversion
    pattern: str | None  # of the converter; None: the tensor is the parameter


class _Renaming:
    """The renamings and conversions of one model of transformers, on the device meta."""

    def __init__(self, model: Any, layers: int) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._state = model.state_dict()
        self._ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
        self._layers = layers
        self.by_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}

    def target(self, name: str) -> _Target:
        stem, _, end = name.rpartition(".")
        is_part = end in _QUANTISED and name not in self._state
        # The tensors of a quantised weight follow the name of the weight.
        like = f"{stem}.weight" if is_part else name
        parameter, pattern = rename_source_key(like, self._renamings, self._converters, self._prefix, self._state)
        if parameter not in self._state and like in self._state:
            parameter, pattern = like, None
        own = parameter if pattern is None else apply_renamings(like, self._renamings)
        return _Target(parameter, f"{own.rpartition('.')[0]}.{end}" if is_part else own, pattern)

    def is_derived(self, name: str, target: _Target) -> bool:
        """Whether the model computes the tensor from config.json."""
        return target.parameter not in self._state and bool(_DERIVED.search(name))

    def is_unused(self, name: str, target: _Target) -> bool:
        """Whether transformers leaves the tensor out, or it is one of a layer after the last one."""
        layer = _LAYER.match(name)
        is_extra = layer is not None and int(layer[1]) >= self._layers
        is_ignored = any(pattern.search(name) for pattern in self._ignored)
        return target.parameter not in self._state and (is_extra or is_ignored)


def named(model: Any, tensors: Mapping[str, StoredTensor], layers: int) -> Names:
    """`model`: transformers' model on the device meta, with `layers` layers."""
    renaming = _Renaming(model, layers)
    renamed: dict[str, StoredTensor] = {}
    conversions: dict[str, Conversion] = {}
    unused: list[str] = []
    for name in sorted(tensors, key=dot_natural_key):
        target = renaming.target(name)
        if renaming.is_unused(name, target):
            unused.append(name)
        elif not renaming.is_derived(name, target):
            renamed[target.own] = tensors[name]
            if target.pattern is not None:
                empty = Conversion(renaming.by_pattern[target.pattern], {})
                sources = conversions.setdefault(target.parameter, empty).sources
                sources.setdefault(target.pattern, []).append(target.own)
    reason = f"not used, because transformers' code of {model.config.model_type} has no such tensor"
    return Names(renamed, conversions, (f"{listed(unused)}: {reason}",) if unused else ())
