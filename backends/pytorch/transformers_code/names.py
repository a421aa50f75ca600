"""The names of tensors in a model's files -> the names of transformers' code, as from_pretrained maps them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

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


# Ends of the names of tensors that a quantised weight has instead of "weight".
_QUANTISED = frozenset(
    "qweight qzeros scales g_idx weight_packed weight_scale weight_shape weight_zero_point weight_g_idx "
    "weight_scale_inv weight_offset input_scale input_offset quant_bias deq_scale blocks".split()
)


@dataclass(frozen=True)
class Conversion:
    """Tensors of the files that become parameters of other shapes."""

    converter: WeightConverter
    sources: Mapping[str, list[str]]  # pattern of the converter -> names of tensors, in order

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


def named(model: Any, tensors: Mapping[str, StoredTensor], layers: int) -> Names:
    """`model`: transformers' model on the device meta, with `layers` layers."""
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    state = model.state_dict()
    renamed: dict[str, StoredTensor] = {}
    sources: dict[str, tuple[WeightConverter, dict[str, list[str]]]] = {}
    unused: list[str] = []
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    for name in sorted(tensors, key=dot_natural_key):
        stem, _, end = name.rpartition(".")
        like = f"{stem}.weight" if end in _QUANTISED and name not in state else name
        target, pattern = rename_source_key(like, renamings, converters, model.base_model_prefix, state)
        if target not in state and like in state:
            target, pattern = like, None
        if _DERIVED.search(name) and target not in state:
            continue
        if target not in state and (any(each.search(name) for each in ignored) or _is_extra(name, layers)):
            unused.append(name)
            continue
        if pattern is not None:
            own = apply_renamings(like, renamings)
            sources.setdefault(target, (by_pattern[pattern], {}))[1].setdefault(pattern, []).append(own)
            target = own
        if like != name:
            target = f"{target.rpartition('.')[0]}.{end}"
        renamed[target] = tensors[name]
    conversions = {target: Conversion(*each) for target, each in sources.items()}
    reason = f"not used, because transformers' code of {model.config.model_type} has no such tensor"
    return Names(renamed, conversions, (f"{listed(unused)}: {reason}",) if unused else ())


def _is_extra(name: str, layers: int) -> bool:
    """Whether the tensor is one of a layer after the last one."""
    layer = re.match(r"(?:\w+\.)*?(?:layers|h)\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= layers
