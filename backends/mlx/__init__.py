"""Apple GPUs through MLX, with the models of mlx-lm. MLX's CPU and CUDA devices run the same code elsewhere."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from ...engine.modelfiles import ModelFiles
from ...engine.options import LoadOptions
from ...engine.runner import DeviceInfo, Runner, Unavailable
from .machine import apple_chip, memory

name = "mlx"

CUDA = ("mlx-cuda-13", "mlx-cuda-12")  # packages that let MLX compute on NVIDIA GPUs


def probe() -> DeviceInfo | Unavailable:
    """Looks at the machine, then at which packages are installed, and imports none of them."""
    apple = (platform.system(), platform.machine()) == ("Darwin", "arm64")
    missing = [package for package in ("mlx", "mlx_lm") if find_spec(package) is None]
    if missing:
        found = (
            "Apple silicon is present, but" if apple else f"this is {platform.system()} on {platform.machine()}, and"
        )
        return Unavailable(
            name, f"{found} {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        )
    (total, free), features = memory(), {"MLX": _version("mlx"), "mlx-lm": _version("mlx-lm")}
    if apple:
        return DeviceInfo(name, apple_chip(), total, free, features | {"Metal": "yes"}, main_memory=True)
    if any(_version(package) for package in CUDA):
        return DeviceInfo(name, "NVIDIA GPU through MLX", total, free, features, second_choice=True)
    return DeviceInfo(name, "MLX's CPU device", total, free, features, main_memory=True, second_choice=True)


def accepts(files: ModelFiles) -> str:
    """mlx-lm has a module for each architecture, and a list of those that share one."""
    spec, wanted = find_spec("mlx_lm"), files.config.model_type
    if spec is None or spec.origin is None:
        return "mlx_lm is not installed"
    if wanted.isidentifier() and (Path(spec.origin).parent / "models" / f"{wanted}.py").is_file():
        return ""
    from mlx_lm.utils import MODEL_REMAPPING

    return "" if wanted in MODEL_REMAPPING else f"mlx-lm has no architecture {wanted:.50}"


def open(files: ModelFiles, budget: LoadOptions) -> Runner:
    from .opening import open_on_mlx

    return open_on_mlx(files, budget)


def read_bandwidth() -> float:
    from .reading import read_bandwidth as measured

    return measured()


def _version(package: str) -> str:
    """Empty where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
