"""Compares the tensors of experts with config.json, from the headers of the files. Only a load reads the values."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from ...engine.errors import ModelRefused
from ...engine.files.adapter_files import EXPERTS
from ...engine.files.model_files import ModelFiles
from ...engine.files.moe_config import MoeConfig
from ...engine.files.tensor_files import StoredTensor
from ...kernels.ops.linear_mxfp4 import GROUP

_EXPERT = re.compile(rf"(model\.layers\.\d+)\..*\b{EXPERTS}\.(\d+)\..*")
_STACK = re.compile(rf"(model\.layers\.\d+)\..*\b{EXPERTS}\.(gate_up|down)_proj(|_bias|_blocks|_scales)")
_OLDER = re.compile(r"(\.block_sparse_moe)\.(input|output)_linear\.weight$")
_MATRICES = ("BF16", "F16", "F32", "F8_E4M3", "I8")  # dtypes of tensors that are [out_features, in_features]


def with_expert_names(files: ModelFiles) -> ModelFiles:
    """The files with the tensors of all experts under one name in every architecture: Granite has others."""
    tensors = {_OLDER.sub(_newer, name): tensor for name, tensor in files.tensors.items()}
    return replace(files, tensors=MappingProxyType(tensors))


def _newer(name: re.Match[str]) -> str:
    projection = "gate_up" if name[2] == "input" else "down"
    return f"{name[1]}.{EXPERTS}.{projection}_proj"


def check_experts(files: ModelFiles) -> None:
    """Raises ModelRefused, with the name of the tensor, if the files have another number or other sizes of experts than
    config.json."""
    moe = files.config.moe
    if moe is None:
        return
    hidden = files.config.hidden_size
    singles: defaultdict[str, set[int]] = defaultdict(set)  # experts of each layer that have tensors of their own
    for name, tensor in sorted(files.tensors.items()):
        stack = _STACK.fullmatch(name)
        single = _EXPERT.fullmatch(name)
        if stack:
            _check_shape(name, tensor, _stack_shapes(moe, hidden, stack[2], stack[3]))
        elif single:
            singles[single[1]].add(int(single[2]))
        if single and name.endswith(".weight") and tensor.dtype in _MATRICES:
            _check_shape(name, tensor, [(moe.inner_size, hidden), (hidden, moe.inner_size)])
    for layer, experts in singles.items():
        if experts != set(range(moe.experts)):
            raise ModelRefused(
                f"{files.name}: the experts of {layer} must have the numbers 0 to {moe.experts - 1} (config.json), "
                f"but the files have {len(experts)}, up to {max(experts)}"
            )


def _stack_shapes(moe: MoeConfig, hidden: int, projection: str, end: str) -> list[tuple[int, ...]]:
    """The possible shapes of a tensor of all experts."""
    count, out_features, in_features = moe.experts, hidden, moe.inner_size
    if projection == "gate_up":
        out_features, in_features = 2 * moe.inner_size, hidden
    match end:
        case "_bias":
            return [(count, out_features)]
        case "_blocks":
            return [(count, out_features, in_features // GROUP, GROUP // 2)]
        case "_scales":
            return [(count, out_features, in_features // GROUP)]
    return [(count, out_features, in_features), (count, in_features, out_features)]


def _check_shape(name: str, tensor: StoredTensor, shapes: Sequence[tuple[int, ...]]) -> None:
    if tensor.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ModelRefused(
            f"{tensor.file.name}: tensor {name!r} must be {expected} (config.json), not {list(tensor.shape)}"
        )
