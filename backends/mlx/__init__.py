"""Apple GPUs through MLX, with the models of mlx-lm. MLX's CPU and CUDA devices run the same code elsewhere."""

from __future__ import annotations

import platform
from importlib.util import find_spec
from pathlib import Path

from ...engine.modelfiles import ModelFiles
from ...engine.runner import Budget, DeviceInfo, Runner, Unavailable
from .machine import memory

name = "mlx"


def probe() -> DeviceInfo | Unavailable:
    """Whether MLX is installed and what it would compute on; it is imported only where it is there."""
    apple = (platform.system(), platform.machine()) == ("Darwin", "arm64")
    machine = "Apple silicon is present" if apple else f"no Apple silicon (this is {platform.system()} on {platform.machine()})"
    missing = [package for package in ("mlx", "mlx_lm") if find_spec(package) is None]
    if missing:
        return Unavailable(name, f"{machine}{', but' if apple else ', and'} {' and '.join(missing)} not installed")
    try:
        import mlx.core as mx
    except ImportError as error:
        return Unavailable(name, f"{machine}, but mlx cannot be imported: {error}")
    (total, free), metal = memory(), mx.metal.is_available()
    features = {"Metal": "yes" if metal else "no", "MLX": mx.__version__}
    if mx.default_device() == mx.cpu:
        # Its matrix products are a hundred times slower than ours: it shows that the path works, no more.
        return DeviceInfo(name, "MLX's CPU device", total, free, features, main_memory=True, only_asked=True)
    return DeviceInfo(name, str(mx.device_info().get("device_name", "GPU")), total, free, features, main_memory=metal)


def accepts(files: ModelFiles) -> str:
    """mlx-lm has a module for each architecture, and a list of those that share one."""
    spec, wanted = find_spec("mlx_lm"), files.config.model_type
    if spec is None or spec.origin is None:
        return "mlx_lm is not installed"
    if (Path(spec.origin).parent / "models" / f"{wanted}.py").is_file():
        return ""
    from mlx_lm.utils import MODEL_REMAPPING

    return "" if wanted in MODEL_REMAPPING else f"mlx-lm has no architecture {wanted}"


def open(files: ModelFiles, budget: Budget) -> Runner:
    from .device import open_on_mlx

    return open_on_mlx(files, budget)


def read_bandwidth() -> float | None:
    from .reading import read_bandwidth as measured

    return measured()
