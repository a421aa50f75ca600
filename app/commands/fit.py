"""`localllm fit`: whether a model fits in the memory of this machine, as text or JSON."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from ... import backends
from ...engine.errors import ModelRefused
from ...engine.files.gguf_model import model_file
from ...engine.files.gguf_names import gguf_hint
from ...engine.files.model_files import ModelFiles, read_model
from ...engine.files.quantization import Quant
from .. import config
from ..api.admin import LoadFlags
from ..daemon.loading import load_options, load_settings, shared_settings
from ..errors import InvalidRequest, ModelUnusable, NoBackend, WrongKind
from ..sizes import size
from ..store.checks.files import check, missing_tensor
from ..store.inspection.memory_fit import fit as fit_files
from ..store.inspection.opening import Origin, opened
from ..store.local.refs import ModelRef, read_ref
from ..store.records import Fit, FitReport
from ..store.resolved import base_argument
from ..store.selection import NO_CONFIG
from .console import one_line, print_json, say


def fit(name: str, context: int, parallel: int, quant: Quant | None, backend: str | None, as_json: bool) -> int:
    """Print the fit on each backend. The exit code is 5 if the model fits on none."""
    report = measure(name, context, parallel, quant, backend)
    if as_json:
        print_json(report)
    else:
        for entry in report.fits:
            _print(entry)
        if report.hint:
            say(f"hint: {report.hint}")
    return 0 if any(entry.fits for entry in report.fits) else ModelUnusable.exit_code


def measure(name: str, context: int, parallel: int, quant: Quant | None, backend: str | None) -> FitReport:
    """The memory of a model on each backend. `context`: 0 means the largest context that fits.

    Raises ModelNotFound, ModelUnusable, WrongKind, NoBackend, DownloadFailed or InvalidRequest.
    """
    defaults = config.load()
    try:
        if backend not in (None, backends.AUTO):
            backends.load(backend)
    except backends.BackendUnavailable as error:
        raise InvalidRequest(str(error), hint=error.hint, param="backend") from None
    try:
        with opened(name) as (path, origin):
            ref = _model_of(path, origin)
            flags = LoadFlags(quant=quant, backend=backend, context=context or None)
            settings = load_settings(defaults, ref.id, flags)
            files = read_model(ref.path, ref.id)
            if missing := missing_tensor(files):
                raise ModelRefused(f"{ref.id}: {missing}")
            options = load_options(settings, ref)
            fits = fit_files(files, options, settings.backend, settings.context, parallel, shared_settings(settings))
    except ModelRefused as error:
        raise ModelUnusable(str(error), hint=error.hint, param="model") from error
    except backends.BackendUnavailable as error:
        raise NoBackend(str(error), hint=error.hint) from error
    return FitReport(model=ref.id, fits=fits, hint=_hint(files, fits))


def _hint(files: ModelFiles, fits: list[Fit]) -> str:
    """The hint if no backend runs the model."""
    model_type = "" if files.gguf else files.config.multimodal or files.config.model_type
    return "" if any(entry.runs for entry in fits) else gguf_hint(files.name, model_type)


def _model_of(path: Path, origin: Origin) -> ModelRef:
    """The model at a path. Raises ModelUnusable for weights and other files, WrongKind for adapters, ModelRefused for a
    GGUF file with a damaged header: a process with limits reads it here before this process does."""
    if origin.problem:
        raise ModelUnusable(origin.problem, param="model")
    ref = read_ref(path, origin.name)
    if ref.kind == "adapter":
        hint = f"fit its base model, which reserves memory for adapters: localllm fit {base_argument(ref)}"
        raise WrongKind(f"{origin.name} is an adapter, not a model", hint=hint, param="model")
    if ref.kind == "model":
        return ref
    if ref.kind == "gguf":
        ref = replace(ref, path=model_file(path) or path)
        if problems := check(ref, ask_backends=False):
            raise ModelRefused(problems[0])
        return ref
    if path.suffix != ".safetensors" and not any(path.glob("*.safetensors")):
        message = f"{origin.name} is not a model: it has no config.json and is no GGUF file"
        raise ModelUnusable(message, hint="name a model, the folder of a model, or a GGUF file", param="model")
    raise ModelUnusable(f"{origin.name}: {NO_CONFIG}", hint="name the folder or the repository", param="model")


def _print(entry: Fit) -> None:
    click.echo(one_line(f"{entry.backend} ({entry.device}): {_verdict(entry)}"))
    if not entry.free:
        return
    sequences = f"{entry.parallel} x " if entry.parallel > 1 else ""
    lines = [
        ("free", size(entry.free)),
        ("weights", size(entry.weights)),
        ("adapters", size(entry.adapters)),
        ("KV cache", f"{size(entry.cache)} for {sequences}{entry.context} tokens; limit {size(entry.max_cache)}"),
        *([("windows", f"save {size(entry.window_savings)} of KV cache")] if entry.window_savings else []),
        ("remaining", f"{size(entry.remaining)} for intermediate results, graphs and other programs"),
        ("context", f"at most {entry.largest_context} tokens{' each' if entry.parallel > 1 else ''}"),
    ]
    if entry.tokens_per_second is not None:
        digits = 0 if entry.tokens_per_second >= 10 else 1
        lines.append(("speed", f"about {entry.tokens_per_second:.{digits}f} tokens/s for one answer (estimated)"))
    lines += [("note", note) for note in entry.notes]
    for title, text in lines:
        click.echo(f"  {title:<9} {text}")


def _verdict(entry: Fit) -> str:
    if not entry.runs:
        return f"cannot run this model: {entry.reason}"
    return "fits" if entry.fits else f"does not fit: {entry.reason}"
