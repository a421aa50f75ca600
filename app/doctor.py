"""What this machine can run and why: the facts behind `localllm doctor`. No model is loaded for it."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import psutil

from .. import backends
from ..backends import findings
from ..engine.errors import SettingRefused
from ..engine.runner import DeviceInfo, Unavailable
from . import paths
from .errors import ConfigError, NoBackend
from .store import catalog
from .version import VERSION

PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "llguidance",
    "textual",
    "huggingface_hub",
    "flashinfer-python",
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One backend: yes, or the reason why not."""

    backend: str
    available: bool
    says: str  # the hardware's name, or the reason
    memory: int = 0  # bytes in all
    free: int = 0
    features: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Everything doctor knows, except the daemon's state, which only a client can tell."""

    machine: dict[str, str]
    memory: dict[str, int]  # bytes
    backends: list[Verdict]
    choice: str  # empty: none works
    reason: str
    hint: str
    paths: dict[str, str]
    self_tests: dict[str, str]  # what that of its kernels found on each device so far
    disk_free: int  # bytes where models are kept
    models: int
    versions: dict[str, str]

    def for_json(self) -> dict[str, Any]:
        """Plain values; features become an object."""
        return {**asdict(self), "backends": [{**asdict(v), "features": dict(v.features)} for v in self.backends]}


def examine(backend: str = backends.AUTO) -> Report:
    """Look at the machine. A backend that was asked for and cannot run is reported, not raised."""
    choice, reason, hint = _choice(backend)
    memory = psutil.virtual_memory()
    cache = paths.hub_cache_dir()
    return Report(
        machine={
            "system": f"{platform.system()} {platform.release()}",
            "machine": platform.machine(),
            "python": platform.python_version(),
            "cores": f"{psutil.cpu_count(logical=False) or 1} physical, {os.cpu_count() or 1} logical",
        },
        memory={"total": memory.total, "available": memory.available},
        backends=[_verdict(found) for found in backends.probe_all()],
        choice=choice,
        reason=reason,
        hint=hint,
        paths=dict(_places()),
        self_tests=findings.told(paths.self_test_dir()),
        disk_free=shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free,
        models=len(catalog.available()),
        versions={"localllm": VERSION} | {name: found for name in PACKAGES if (found := _version(name))},
    )


@dataclass(frozen=True, slots=True)
class OpsReport:
    """Who computes each op, by platform: "reference" is plain torch."""

    ops: dict[str, dict[str, str]]
    without: list[str]  # platforms that have no runner of the torch family
    reference_ops: list[str]  # the setting that sent ops back to their references


def examine_ops(reference_ops: tuple[str, ...]) -> OpsReport:
    """Imports torch. Raises NoBackend where there is none, ConfigError for an op that there is not."""
    if find_spec("torch") is None:
        raise NoBackend("torch is not installed: the backends here compute with ops of their own")
    from ..backends.platforms import matrix

    try:
        rows = matrix(reference_ops)
    except SettingRefused as error:
        raise ConfigError(str(error), hint=error.hint) from None
    ops = {row.name: dict(row.implementations) for row in rows}
    present = {platform for row in ops.values() for platform in row}
    return OpsReport(ops, [name for name in backends.ORDER if name not in present], list(reference_ops))


def _choice(backend: str) -> tuple[str, str, str]:
    try:
        choice = backends.choose(backend)
    except backends.BackendUnavailable as error:
        return "", str(error), error.hint
    return choice.info.backend, choice.reason, ""


def _verdict(found: DeviceInfo | Unavailable) -> Verdict:
    if isinstance(found, DeviceInfo):
        return Verdict(found.backend, True, found.name, found.memory, found.free, tuple(found.features.items()))
    return Verdict(found.backend, False, found.reason)


def _places() -> Iterator[tuple[str, str]]:
    yield "settings", str(paths.config_file())
    yield "history", str(paths.history_file())
    yield "models", str(paths.hub_cache_dir())
    yield "logs", str(paths.log_dir())
    try:
        yield "socket", str(paths.socket_file())
    except OSError as error:
        yield "socket", f"unusable: {error}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
