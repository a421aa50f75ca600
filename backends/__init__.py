"""The registry of backends: names, probing, and the choice of one.

A backend is a module `backends.<name>` with the names of the protocol `engine.runner.Backend`. A backend whose
`probe()` always returns Unavailable needs only `name` and `probe()`.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, cast

from ..engine.errors import EngineError, ModelRefused
from ..engine.files.gguf_names import gguf_hint
from ..engine.runner import Backend, DeviceInfo, Unavailable

if TYPE_CHECKING:
    from ..engine.files.model_files import ModelFiles

# torch would import torch_npu with itself, and fail without CANN. The backend npu imports it.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

ORDER = ("cuda", "hip", "npu", "xpu", "mlx", "cpu", "llamacpp")
AUTO = "auto"
FOR_GGUF = "llamacpp"  # the only backend that reads GGUF files
OTHER_MODEL = "choose another model"


class BackendUnavailable(EngineError):
    """The requested backend is unavailable, or every backend is. `reasons` maps the name of a backend to its reason."""

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
    """The module of the backend `name`. Raises BackendUnavailable for a name that is not in ORDER."""
    if name not in ORDER:
        similar = difflib.get_close_matches(name.lower(), ORDER, n=1)
        hint = f"did you mean {similar[0]}?" if similar else f"known backends: {', '.join(ORDER)}"
        raise BackendUnavailable(f"unknown backend {name!r}", {}, hint)
    return cast(Backend, import_module(f".{name}", __name__))


def probe_all() -> list[DeviceInfo | Unavailable]:
    """The result of each backend's probe, in ORDER. Imports no tensor library for an unavailable backend."""
    return [load(name).probe() for name in ORDER]


def code_of(backend: Backend, files: ModelFiles) -> str:
    """The code of another library that computes the model, for display; empty if the backend does not say so."""
    code = getattr(backend, "code", None)
    return "" if code is None else str(code(files))


def choose(name: str = AUTO, files: ModelFiles | None = None) -> Choice:
    """The named backend. For AUTO: the first backend in ORDER that is available and accepts the model files; for GGUF
    files always FOR_GGUF.

    AUTO chooses a backend with `second_choice` only if no other backend works. Raises BackendUnavailable with all
    reasons, and ModelRefused if no backend accepts the files.
    """
    if name != AUTO:
        return _choose_named(name, files, f"{name} was requested", "omit --backend, or set backend to auto")
    if files is not None and files.gguf:
        return _choose_named(FOR_GGUF, files, "llama.cpp runs all GGUF files", "")
    return _choose_first(files)


def _choose_named(name: str, files: ModelFiles | None, reason: str, hint: str) -> Choice:
    """`reason`: of the choice. `hint`: of the error for a backend that is unavailable or refuses the files."""
    backend = load(name)
    device = backend.probe()
    if isinstance(device, Unavailable):
        message = f"backend {name} is unavailable: {device.reason}"
        raise BackendUnavailable(message, {name: device.reason}, hint)
    refusal = _refusal(backend, files)
    if files is not None and refusal:
        raise ModelRefused(f"backend {name} does not support {files.name}: {refusal}", _hint(files, name, hint))
    return Choice(backend, device, reason)


def _choose_first(files: ModelFiles | None) -> Choice:
    reasons: dict[str, str] = {}
    refusals: dict[str, str] = {}
    second: list[Choice] = []
    for name in ORDER:
        backend = load(name)
        device = backend.probe()
        if isinstance(device, Unavailable):
            reasons[name] = device.reason
        elif device.second_choice:
            reasons[name] = f"{device.name} is used only if no other backend works, or with --backend {name}"
            second.append(Choice(backend, device, ""))
        elif refusal := _refusal(backend, files):
            reasons[name] = refusals[name] = refusal
        else:
            return Choice(backend, device, _reason(name, reasons))
    for choice in second:
        others = "no other backend supports this model" if refusals else "no other backend works"
        if refusal := _refusal(choice.backend, files):
            reasons[choice.backend.name] = refusals[choice.backend.name] = refusal
        else:
            return replace(choice, reason=f"{others}; {choice.backend.name} does, but slowly")
    if files is not None and refusals:
        raise _refused(files, refusals)
    message = f"no backend works on this machine ({_listed(reasons)})"
    raise BackendUnavailable(message, reasons, "run `localllm doctor` for details")


def _refusal(backend: Backend, files: ModelFiles | None) -> str:
    """The reason why the backend cannot load the files; empty if it can, or if there are no files."""
    return "" if files is None else backend.accepts(files)


def _refused(files: ModelFiles, refusals: dict[str, str]) -> ModelRefused:
    return ModelRefused(f"no backend supports {files.name} ({_listed(refusals)})", _hint(files))


def _hint(files: ModelFiles, refusing: str = "", others: str = "") -> str:
    """The hint after a refusal. `refusing`: the backend that was requested. `others`: the hint if another backend
    of this machine accepts the files."""
    backends = [load(name) for name in ORDER if others and name != refusing]
    if any(not isinstance(backend.probe(), Unavailable) and not backend.accepts(files) for backend in backends):
        return others
    model_type = "" if files.gguf else files.config.multimodal or files.config.model_type
    return gguf_hint(files.name, model_type) or OTHER_MODEL


def _listed(reasons: dict[str, str]) -> str:
    return "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())


def _reason(name: str, reasons: dict[str, str]) -> str:
    """The reason why AUTO chose a backend; `reasons` has the backends that it skipped."""
    if not reasons:
        return f"{name} is the preferred backend"
    return f"{name} is the first that works; not available: {', '.join(reasons)}"
