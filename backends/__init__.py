"""Which backends there are, which of them can run here, and which one to take.

Each is a module `backends.<name>` with the names of `engine.runner.Backend`; one whose `probe()` always says
Unavailable needs no more than `name` and `probe()`.
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
    """The backend asked for, or every backend, cannot run here; `reasons` says why, by name."""

    def __init__(self, message: str, reasons: dict[str, str], hint: str = "") -> None:
        self.reasons, self.hint = reasons, hint
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend to use, what it runs on, and why it was taken."""

    backend: Backend
    info: DeviceInfo
    reason: str


def load(name: str) -> Backend:
    """The backend's module. Raises BackendUnavailable for a name that is not in ORDER."""
    if name not in ORDER:
        near = difflib.get_close_matches(name.lower(), ORDER, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known backends: {', '.join(ORDER)}"
        raise BackendUnavailable(f"unknown backend {name!r}", {}, hint)
    return cast(Backend, import_module(f".{name}", __name__))


def probe_all() -> list[DeviceInfo | Unavailable]:
    """What each backend says of this machine, in ORDER. Imports no tensor library where the answer is no."""
    return [load(name).probe() for name in ORDER]


def choose(name: str = AUTO, files: ModelFiles | None = None) -> Choice:
    """The named backend, or the first in ORDER that runs here and, given a model's files, accepts them. Those that are
    slower than another on the same hardware come last.

    Raises BackendUnavailable with every reason met on the way, ModelRefused where no backend takes the files.
    """
    reasons: dict[str, str] = {}
    refusals: dict[str, str] = {}
    second: Choice | None = None
    for candidate in ORDER if name == AUTO else (name,):
        backend = load(candidate)
        found = backend.probe()
        if isinstance(found, Unavailable):
            reasons[candidate] = found.reason
            continue
        refusal = backend.accepts(files) if files is not None else ""
        if refusal:
            reasons[candidate] = refusals[candidate] = refusal
            continue
        if found.second_choice and name == AUTO:
            reasons[candidate] = f"{found.name} is for when nothing else runs, or --backend {candidate}"
            second = second or Choice(backend, found, "")
            continue
        return Choice(backend, found, _why(candidate, name, reasons))
    if second is not None:
        others = "nothing else takes this model" if refusals else "nothing else runs here"
        return replace(second, reason=f"{others}; {second.info.backend} does, if slowly")
    if files is not None and refusals:
        told = "; ".join(f"{backend}: {refusal}" for backend, refusal in refusals.items())
        raise ModelRefused(f"{files.name} cannot be run here ({told})", "choose another model")
    if name == AUTO:
        told = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
        raise BackendUnavailable(f"no backend can run this here ({told})", reasons, "see localllm doctor")
    raise BackendUnavailable(f"backend {name} cannot be used: {reasons[name]}", reasons, "leave out --backend")


def _why(chosen: str, asked: str, passed_over: dict[str, str]) -> str:
    if asked == chosen:
        return f"{chosen} was asked for"
    if not passed_over:
        return f"{chosen} is the first backend and runs here"
    return f"{chosen} is the first that works here; not {', not '.join(passed_over)}"
