"""The trace of `localllm doctor --ops --trace`: the ops of a short answer, in this process."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from ..backends.shared_settings import choose_for, without_refused
from ..engine.engine import Engine
from ..engine.errors import EngineError
from ..engine.files.model_files import read_model
from ..engine.request import Request, Sampling
from ..engine.runner import Backend, Runner
from .api.admin import LoadFlags
from .config import Settings
from .daemon.loading import load_options, load_settings, shared_settings
from .errors import NoBackend
from .store.resolved import model
from .worker.faults import app_error

PROMPT_TOKENS = 12
TOKENS = 3  # of an answer: prefill, then decode steps
SAMPLINGS = (Sampling(), Sampling(temperature=1.0, top_p=0.9, logprobs=1))  # of one request each


@dataclass(frozen=True, slots=True)
class TracedCall:
    """Equal calls of an op."""

    op: str
    implementation: str
    inputs: str
    output: str
    calls: int


@dataclass(frozen=True, slots=True)
class TraceReport:
    """The ops of two short answers of a model."""

    model: str
    backend: str
    calls: list[TracedCall]
    warnings: list[str]  # of the load, e.g. a kernel that failed its self-test


def trace(name: str, settings: Settings) -> TraceReport:
    """Load a model without graphs, whose steps call no ops, and trace two answers.

    Raises AppError for a model that cannot be loaded, NoBackend if its backend is no torch backend.
    """
    ref = model(name, allow_path=True)
    settings = load_settings(settings, ref.id, LoadFlags())
    shared = shared_settings(settings)
    try:
        files = read_model(ref.path, ref.id)
        chosen = choose_for(settings.backend, files, shared)
        backend = chosen.result.backend
        _check(backend)
        options = replace(load_options(settings, ref), graphs="off")
        loaded = without_refused(partial(backend.open, files), ref.id, options, shared)
        warnings = [*chosen.warnings, *loaded.warnings, *loaded.result.spec.warnings]
        return TraceReport(ref.id, backend.name, _answers(loaded.result), warnings)
    except EngineError as error:
        raise app_error(error) or error from error


def _check(backend: Backend) -> None:
    from ..backends.platforms import kernel_sets

    sets = kernel_sets()
    if backend.name not in sets:
        hint = f"trace on one of {', '.join(sets)}, with --backend"
        raise NoBackend(f"{backend.name} runs this model, and only torch backends have ops", hint=hint)


def _answers(runner: Runner) -> list[TracedCall]:
    from ..backends.pytorch.runner import TorchRunner
    from ..backends.pytorch.trace import traced

    assert isinstance(runner, TorchRunner)
    engine = Engine(runner)
    tokens = tuple(number % runner.spec.vocab_size for number in range(1, 1 + PROMPT_TOKENS))
    with closing(engine), traced(runner.device) as calls:
        for number, sampling in enumerate(SAMPLINGS):
            engine.submit(Request(str(number), tokens, TOKENS, sampling))
        while engine.has_work:
            engine.step()
    return [TracedCall(*call, count) for call, count in calls.items()]
