"""Apple GPUs through MLX, with the models of mlx-lm. MLX's CPU and CUDA devices run the same code elsewhere."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from ...engine.modelfiles import ModelFiles
from ...engine.options import LoadOptions
from ...engine.runner import DeviceInfo, Runner, Unavailable
from .machine import apple_chip, memory, read_bandwidth

__all__ = ["accepts", "name", "open", "probe", "read_bandwidth"]

name = "mlx"

CUDA = ("mlx-cuda-13", "mlx-cuda-12")  # packages that let MLX compute on NVIDIA GPUs


def probe() -> DeviceInfo | Unavailable:
    """Checks the machine and the installed packages, and imports none of them."""
    apple = (platform.system(), platform.machine()) == ("Darwin", "arm64")
    missing = [package for package in ("mlx", "mlx_lm") if find_spec(package) is None]
    if missing:
        machine = "Apple silicon is present, but"
        if not apple:
            machine = f"this is {platform.system()} on {platform.machine()}, and"
        verb = "is" if len(missing) == 1 else "are"
        return Unavailable(name, f"{machine} {' and '.join(missing)} {verb} not installed")
    total, free = memory()
    features = {"MLX": _version("mlx"), "mlx-lm": _version("mlx-lm")}
    if apple:
        return DeviceInfo(name, apple_chip(), total, free, features | {"Metal": "yes"}, main_memory=True)
    if any(_version(package) for package in CUDA):
        return DeviceInfo(name, "NVIDIA GPU through MLX", total, free, features, second_choice=True)
    return DeviceInfo(name, "MLX's CPU device", total, free, features, main_memory=True, second_choice=True)


def accepts(files: ModelFiles) -> str:
    """mlx-lm has a module for each architecture, and a list of those that share one."""
    spec = find_spec("mlx_lm")
    model_type = files.config.model_type
    if spec is None or spec.origin is None:
        return "mlx_lm is not installed"
    if model_type.isidentifier() and (Path(spec.origin).parent / "models" / f"{model_type}.py").is_file():
        return ""
    from mlx_lm.utils import MODEL_REMAPPING

    return "" if model_type in MODEL_REMAPPING else f"mlx-lm has no architecture {model_type:.50}"


def open(files: ModelFiles, budget: LoadOptions) -> Runner:
    from .opening import open_on_mlx

    return open_on_mlx(files, budget)


def _version(package: str) -> str:
    """Empty where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
