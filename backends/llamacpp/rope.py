"""The settings of RoPE: rope_scaling, rope_scale and rope_base, as llama.cpp computes them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...engine.errors import ContextRefused, SettingRefused
from ...engine.files.model_files import ModelFiles
from ...engine.files.rope_config import Rope
from ...engine.options import LoadOptions

# Value of the option rope_scaling -> llama_rope_scaling_type.
SCALINGS: Mapping[str, int] = MappingProxyType({"auto": -1, "none": 0, "linear": 1, "yarn": 2})
NO_ROPE = -1  # llama_rope_type of a model without RoPE
MAX_POSITIONS = 2**27
MAX_BASE = 1e15
_NO_ROPE = Rope("default", MAX_BASE, 0)
HINT = "--rope-scale FACTOR with --rope-scaling yarn or linear, or a larger --rope-base, allow a larger context"


def check_rope(files: ModelFiles, options: LoadOptions) -> None:
    """Raises SettingRefused for settings of RoPE that contradict each other, or that the file has no RoPE for."""
    if files.config.ropes.get("full") is None or "position_embd.weight" in files.tensors:
        refuse_without_rope(files, options)
    rope = _rope(files)
    if options.rope_scaling == "none" and options.rope_scale is not None:
        raise SettingRefused(
            "rope_scale has no effect with rope_scaling none", "leave out one of the two", setting="rope_scale"
        )
    is_scaled = rope.kind != "default" and rope.factor not in (0.0, 1.0)
    if options.rope_scaling in ("linear", "yarn") and options.rope_scale is None and not is_scaled:
        raise SettingRefused(
            f"rope_scaling {options.rope_scaling} needs rope_scale: {files.name} has no factor of its own",
            "for example rope_scale 2 for twice the trained context",
            setting="rope_scaling",
        )


def refuse_without_rope(files: ModelFiles, options: LoadOptions) -> None:
    """Raises SettingRefused for settings of RoPE, because the model has none."""
    default = LoadOptions()
    for name in ("rope_scaling", "rope_scale", "rope_base"):
        if getattr(options, name) != getattr(default, name):
            raise SettingRefused(f"{name}: {files.name} has no RoPE", f"leave out {name}", setting=name)


def default_context(files: ModelFiles, options: LoadOptions) -> int:
    """The largest context that the model was trained for, with the scaling of the options."""
    trained = files.config.max_positions
    if options.rope_scaling == "none":
        return min(trained, _rope(files).original_positions or trained)
    if options.rope_scale is None:
        return trained
    return min(MAX_POSITIONS, max(1, int((_rope(files).original_positions or trained) * options.rope_scale)))


def check_context(files: ModelFiles, options: LoadOptions, context: int) -> None:
    """Raises ContextRefused for a context that neither the training nor the settings of RoPE allow."""
    limit = default_context(files, options)
    # No number of positions follows from a larger base: the user has chosen both.
    largest = MAX_POSITIONS if (options.rope_base or 0.0) > _rope(files).theta else limit
    if not 1 <= context <= largest:
        raise ContextRefused(files.name, context, limit, HINT if files.config.ropes else "")


def set_rope(params: Any, options: LoadOptions) -> None:
    """Set the fields of llama_context_params. 0 and -1: those of the model's file."""
    params.rope_scaling_type = SCALINGS[options.rope_scaling]
    params.rope_freq_base = options.rope_base or 0.0
    params.rope_freq_scale = 1.0 / options.rope_scale if options.rope_scale else 0.0


def _rope(files: ModelFiles) -> Rope:
    return files.config.ropes.get("full") or _NO_ROPE
