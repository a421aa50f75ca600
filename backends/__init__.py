"""The registry of backends: names, probing, and the choice of one.

A backend is a module `backends.<name>` with the names of `engine.runner.Backend`. If its `probe()` always returns
Unavailable, it needs only `name` and `probe()`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, cast

from ..engine.errors import EngineError, ModelRefused
from ..engine.runner import Backend, DeviceInfo, Unavailable

if TYPE_CHECKING:
    from ..engine.modelfiles import ModelFiles

ORDER = ("cuda", "hip", "npu", "xpu", "mlx", "cpu", "llamacpp")
AUTO = "auto"


class BackendUnavailable(EngineError):
    """The requested backend, or every backend, is unavailable. `reasons` has the reason of each."""

    def __init__(self, message: str, reasons: dict[str, str], hint: str = "") -> None:
        self.reasons = reasons
        self.hint = hint
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Choice:
    """The selected backend, its device, and the reason for the choice."""

    backend: Backend
    info: DeviceInfo
    reason: str


def load(name: str) -> Backend:
    """The module of a backend. Raises BackendUnavailable for a name that is not in ORDER."""
    if name not in ORDER:
        near = difflib.get_close_matches(name.lower(), ORDER, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known backends: {', '.join(ORDER)}"
        raise BackendUnavailable(f"unknown backend {name!r}", {}, hint)
    return cast(Backend, import_module(f".{name}", __name__))


def probe_all() -> list[DeviceInfo | Unavailable]:
    """The result of each backend's probe, in ORDER. Imports no tensor library for an unavailable backend."""
    return [load(name).probe() for name in ORDER]


def choose(name: str = AUTO, files: ModelFiles | None = None) -> Choice:
    """The named backend, or the first one in ORDER that is available and accepts the model files.

    Backends with `second_choice` come last. Raises BackendUnavailable with all reasons, ModelRefused if no backend
    accepts the files.
    """
    reasons: dict[str, str] = {}
    refusals: dict[str, str] = {}
    second: Choice | None = None
    for candidate in ORDER if name == AUTO else (name,):
        backend = load(candidate)
        device = backend.probe()
        if isinstance(device, Unavailable):
            reasons[candidate] = device.reason
            continue
        refusal = backend.accepts(files) if files is not None else ""
        if refusal:
            reasons[candidate] = refusals[candidate] = refusal
            continue
        if device.second_choice and name == AUTO:
            reasons[candidate] = f"{device.name} is used only if no other backend works, or with --backend {candidate}"
            second = second or Choice(backend, device, "")
            continue
        return Choice(backend, device, _reason(candidate, name, reasons))
    if second is not None:
        others = "no other backend supports this model" if refusals else "no other backend works"
        return replace(second, reason=f"{others}; {second.info.backend} does, but slowly")
    if files is not None and refusals:
        details = "; ".join(f"{backend}: {refusal}" for backend, refusal in refusals.items())
        raise ModelRefused(f"no backend supports {files.name} ({details})", "choose another model")
    if name == AUTO:
        details = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
        raise BackendUnavailable(f"no backend works on this machine ({details})", reasons, "see localllm doctor")
    raise BackendUnavailable(f"backend {name} is unavailable: {reasons[name]}", reasons, "omit --backend")


def _reason(backend: str, name: str, reasons: dict[str, str]) -> str:
    if name == backend:
        return f"{backend} was requested"
    if not reasons:
        return f"{backend} is the preferred backend"
    return f"{backend} is the first that works; not available: {', '.join(reasons)}"
