"""Apple GPUs through MLX, with the models of mlx-lm. On other machines MLX has a CPU and a CUDA device."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from ...engine.files.config_files import read_config
from ...engine.files.model_files import ModelFiles
from ...engine.memory_plan import MemoryPlan
from ...engine.options import LoadOptions
from ...engine.runner import DeviceInfo, Runner, Unavailable
from . import architectures, formats
from .machine import apple_chip, memory, read_bandwidth

__all__ = ["accepts", "name", "open", "plan_memory", "probe", "read_bandwidth"]

name = "mlx"

NVIDIA = "NVIDIA GPU through MLX"
CUDA = ("mlx-cuda-13", "mlx-cuda-12")  # packages that let MLX compute on NVIDIA GPUs


def probe() -> DeviceInfo | Unavailable:
    """Check the machine and the installed packages, without an import of them."""
    apple = (platform.system(), platform.machine()) == ("Darwin", "arm64")
    missing = [package for package in ("mlx", "mlx_lm") if find_spec(package) is None]
    if missing:
        machine = f"this is {platform.system()} on {platform.machine()}, and"
        if apple:
            machine = "Apple silicon is present, but"
        verb = "is" if len(missing) == 1 else "are"
        return Unavailable(name, f"{machine} {' and '.join(missing)} {verb} not installed")
    device = "MLX's CPU device"
    if apple:
        device = apple_chip()
    elif any(_version(package) for package in CUDA):
        device = NVIDIA
    features = {"MLX": _version("mlx"), "mlx-lm": _version("mlx-lm")}
    if apple:
        features["Metal"] = "yes"
    main_memory = device != NVIDIA
    return DeviceInfo(name, device, *memory(), features, main_memory=main_memory, second_choice=not apple)


def accepts(files: ModelFiles) -> str:
    """The reason why mlx-lm cannot load a model, or computes it differently from transformers; empty if it is right.

    The model is loaded with lazy arrays and verified: no weight is read. Without tensors in `files`, its config.json is
    verified; that of an architecture that ModelConfig describes is right.
    """
    if files.gguf:
        return "it reads no GGUF files"
    if find_spec("mlx_lm") is None:
        return "mlx_lm is not installed"
    values = read_config(files.path)
    refusal = architectures.refusal(values) or formats.refusal(values, files.tensors)
    if refusal or (not files.tensors and architectures.is_described(files.config)):
        return refusal
    from .loading import refusal_of_load

    return refusal_of_load(files)


def open(files: ModelFiles, budget: LoadOptions) -> Runner:
    from .opening import open_on_mlx

    return open_on_mlx(files, budget)


def plan_memory(files: ModelFiles, options: LoadOptions) -> MemoryPlan:
    from .opening import plan_on_mlx

    return plan_on_mlx(files, options)


def _version(package: str) -> str:
    """The version of a package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
