"""Apple GPUs through MLX, with the models of mlx-lm. On other machines MLX has a CPU and a CUDA device."""

from __future__ import annotations

import ast
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from ...engine.memory import MemoryPlan
from ...engine.modelfiles import ModelFiles
from ...engine.options import LoadOptions
from ...engine.runner import DeviceInfo, Runner, Unavailable
from .machine import apple_chip, memory, read_bandwidth

__all__ = ["accepts", "name", "open", "plan_memory", "probe", "read_bandwidth"]

name = "mlx"

NVIDIA = "NVIDIA GPU through MLX"
CACHES = {"KVCache", "RotatingKVCache"}  # the cache classes of mlx-lm that this backend replaces
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
    """The reason why mlx-lm cannot load a model; empty if it has a module of this architecture or of an equal one, and
    the layers of that module store only keys and values."""
    if files.gguf:
        return "it reads no GGUF files"
    spec = find_spec("mlx_lm")
    if spec is None or spec.origin is None:
        return "mlx_lm is not installed"
    model_type = files.config.multimodal or files.config.model_type
    module = _module(Path(spec.origin).parent, model_type)
    if module is None:
        from mlx_lm.utils import MODEL_REMAPPING

        module = _module(Path(spec.origin).parent, MODEL_REMAPPING.get(model_type, ""))
    if module is None:
        return f"mlx-lm has no architecture {model_type:.50}"
    others = sorted(_cache_classes(module) - CACHES)
    if others:
        return f"layers of {model_type:.50} store other states than keys and values ({', '.join(others)} of mlx-lm)"
    return ""


def _module(package: Path, model_type: str) -> Path | None:
    """The file of an architecture in mlx-lm; None if there is none."""
    file = package / "models" / f"{model_type}.py"
    return file if model_type.isidentifier() and file.is_file() else None


def _cache_classes(module: Path) -> set[str]:
    """The names of the cache classes that a module of mlx-lm imports. Includes those of the modules that it imports,
    because it may use their layers. No module is executed."""
    imports = _relative_imports(module)
    classes = set(imports.get("cache", ()))
    for name in {*imports, *imports.get("", ())} - {"cache", "base"}:
        imported = _module(module.parent.parent, name)
        if imported is not None:
            classes |= _relative_imports(imported).get("cache", set())
    return {name for name in classes if name[0].isupper()}


def _relative_imports(module: Path) -> dict[str, set[str]]:
    """The names that a module imports from the modules of its package, by module. The key "" has the modules that
    are imported as a whole."""
    imports: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(module.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            imports.setdefault(node.module or "", set()).update(alias.name for alias in node.names)
    return imports


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
