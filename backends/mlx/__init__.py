"""Apple GPUs through MLX. This version finds them but has no runner for them yet."""

from __future__ import annotations

import platform
from importlib.util import find_spec

from ...engine.runner import DeviceInfo, Unavailable

name = "mlx"


def probe() -> DeviceInfo | Unavailable:
    """Looks at the machine, then whether MLX is installed, without importing it."""
    if (platform.system(), platform.machine()) != ("Darwin", "arm64"):
        return Unavailable(name, f"no Apple silicon (this is {platform.system()} on {platform.machine()})")
    if find_spec("mlx") is None:
        return Unavailable(name, "Apple silicon is present, but mlx is not installed")
    return Unavailable(name, "Apple silicon and mlx are present, but this version has no MLX runner yet")
