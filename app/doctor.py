"""The report of `localllm doctor`: backends, machine, paths, versions. Loads no model."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import psutil

from .. import backends
from ..backends import selftest_results
from ..engine.errors import SettingRefused
from ..engine.runner import DeviceInfo, Unavailable
from . import paths
from .errors import ConfigError, NoBackend
from .store.local import snapshots
from .version import VERSION

if TYPE_CHECKING:
    from ..backends.platforms import Listed

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "tokenizers",
    "llguidance",
    "textual",
    "huggingface_hub",
    "flashinfer-python",
)


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """The state of one backend."""

    backend: str
    available: bool
    says: str  # the name of the device, or the reason why the backend is unavailable
    memory: int = 0  # total memory of the device in bytes
    free: int = 0  # free memory of the device in bytes
    features: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """The report of `localllm doctor`, without the state of the daemon."""

    machine: dict[str, str]
    memory: dict[str, int]  # bytes
    backends: list[BackendStatus]
    choice: str  # the selected backend; empty: none works
    reason: str  # why this backend was selected, or why none works
    hint: str  # how to get the backend that was requested; empty if it works
    paths: dict[str, str]
    self_tests: dict[str, str]  # device -> result of its kernel self-test
    disk_free: int  # bytes free on the disk of the model cache
    models: int
    versions: dict[str, str]

    def for_json(self) -> dict[str, Any]:
        """The report as JSON values; features become an object."""
        report = asdict(self)
        for backend in report["backends"]:
            backend["features"] = dict(backend["features"])
        return report


def examine(backend: str = backends.AUTO) -> Report:
    """Probe the machine. If `backend` is unavailable, the report gives the reason. Raises nothing."""
    choice, reason, hint = _choice(backend)
    memory = psutil.virtual_memory()
    return Report(
        machine={
            "system": f"{platform.system()} {platform.release()}",
            "machine": platform.machine(),
            "python": platform.python_version(),
            "cores": f"{psutil.cpu_count(logical=False) or 1} physical, {os.cpu_count() or 1} logical",
        },
        memory={"total": memory.total, "available": memory.available},
        backends=[_status(result) for result in backends.probe_all()],
        choice=choice,
        reason=reason,
        hint=hint,
        paths=dict(_path_lines()),
        self_tests=selftest_results.newest(paths.self_test_dir()),
        disk_free=paths.disk_free(paths.hub_cache_dir()),
        models=len(snapshots.available()),
        versions=versions(),
    )


@dataclass(frozen=True, slots=True)
class OpsReport:
    """The implementation of each op, by platform."""

    ops: dict[str, dict[str, str]]  # op -> platform -> name of the implementation; "-": there is none
    kernels: list[Listed]
    plugins: dict[str, list[str]]  # plug-in -> its unused implementations, with the reasons
    without: list[str]  # backends without an ops table
    choices: list[str]  # LOCALLLM_DEV_OPS
    refused: dict[str, str]  # platform -> the error of a load with these choices


def examine_ops(choices: tuple[str, ...]) -> OpsReport:
    """The ops table. Imports torch. Raises NoBackend if torch is missing, ConfigError for an unknown op or an
    implementation that no platform has."""
    if find_spec("torch") is None:
        raise NoBackend("torch is not installed, and only torch backends have an ops table")
    from ..backends.platforms import kernel_sets, matrix
    from ..backends.pytorch.plugins import plugins

    try:
        table = matrix(kernel_sets(), plugins(), choices)
    except SettingRefused as error:
        raise ConfigError(str(error), hint=error.hint) from None
    names = table.names()
    listed: set[str] = set().union(*names.values())
    return OpsReport(
        names,
        table.kernels(),
        {f"{plugin.name} ({plugin.package})": list(plugin.defects) for plugin in plugins()},
        [name for name in backends.ORDER if name not in listed],
        list(choices),
        {platform: f"{error} ({error.hint})" for platform, error in table.refused.items()},
    )


def _choice(backend: str) -> tuple[str, str, str]:
    try:
        choice = backends.choose(backend)
    except backends.BackendUnavailable as error:
        return "", str(error), error.hint
    return choice.info.backend, choice.reason, ""


def _status(result: DeviceInfo | Unavailable) -> BackendStatus:
    if isinstance(result, DeviceInfo):
        return BackendStatus(
            result.backend, True, result.name, result.memory, result.free, tuple(result.features.items())
        )
    return BackendStatus(result.backend, False, result.reason)


def _path_lines() -> Iterator[tuple[str, str]]:
    yield "settings", str(paths.config_file())
    yield "history", str(paths.history_file())
    yield "models", str(paths.hub_cache_dir())
    yield "logs", str(paths.log_dir())
    try:
        yield "socket", str(paths.socket_file())
    except OSError as error:
        yield "socket", f"not usable: {error}"


def versions() -> dict[str, str]:
    """The versions of localllm and of the installed packages, by name."""
    result = {"localllm": VERSION}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            result[package] = version(package)
    return result
