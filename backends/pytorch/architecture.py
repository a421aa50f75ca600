"""The code that computes a model: a file in models/, or transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module

from ...engine.errors import ModelRefused
from ...engine.files.gguf_names import gguf_hint
from ...engine.files.model_files import ModelFiles
from ...engine.files.tensor_names import listed
from ...engine.files.tied_head import with_stored_head
from ...engine.options import LoadOptions, check_supported
from .device import Device
from .expert_shapes import with_expert_names
from .models import is_native
from .runner import Model
from .weights import Weights


@dataclass(frozen=True, slots=True)
class Architecture:
    """The code of a model, the files that it reads, and the device as this code can use it."""

    files: ModelFiles
    device: Device
    build: Callable[[Weights, int], Model]  # a function of the weights and the maximum context


def architecture_of(files: ModelFiles, device: Device, options: LoadOptions) -> Architecture:
    """A file in models/ if there is one, else transformers' code. Raises ModelRefused if that code is not right over
    our cache, and SettingRefused for an option that it does not support."""
    if not is_native(files.config.model_type):
        return _of_transformers(files, device, options)
    model_type = files.config.model_type
    if files.config.layers:
        device = _without_split(device, options, model_type)
    build = import_module(f".models.{model_type}", __package__).build
    files = planned_files(files)
    return Architecture(files, device, lambda weights, context: build(weights, files.config, context))


def planned_files(files: ModelFiles) -> ModelFiles:
    """The files as the code of the model reads them, for a plan of memory. Raises ModelRefused."""
    if is_native(files.config.model_type):
        return with_expert_names(with_stored_head(files))
    from .transformers_code.describe import describe

    return describe(files).files


def _without_split(device: Device, options: LoadOptions, code: str) -> Device:
    """The device for code that no split graph can cut into segments. Raises SettingRefused for this option."""
    check_supported(options, {"graphs": ("auto", "full", "breakable", "off")}, code)
    return replace(device, graphs="breakable" if device.graphs == "split" else device.graphs)


def _of_transformers(files: ModelFiles, device: Device, options: LoadOptions) -> Architecture:
    from .transformers_code.check import check
    from .transformers_code.describe import describe
    from .transformers_code.model import build

    model_type = files.config.model_type
    device = _without_split(device, options, "transformers' code")
    try:
        description = describe(files)
        verdict = check(description.config)
        description = replace(description, fused=verdict.fused)
    except ModelRefused as error:
        raise ModelRefused(str(error), error.hint or gguf_hint(files.name, model_type)) from error
    notes = [f"transformers' code computes this model: localllm has no page for {model_type}"]
    if options.quant != "none" and description.floats:
        notes.append(f"{listed(description.floats)}: not quantised, because transformers' code multiplies it itself")
    if device.recorder is not None and not verdict.is_capturable:
        check_supported(options, {"graphs": ("auto", "off")}, f"transformers' code of {model_type}")
        device = replace(device, recorder=None)
        notes.append("its steps are not captured as graphs (slower): its code reads values on the host")
    described = replace(description.files, warnings=(*description.files.warnings, *notes))
    return Architecture(described, device, lambda weights, context: build(description, weights))
