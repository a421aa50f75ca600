"""Asks every backend if it has the architectures of models: `python -m localllm.app.worker.accepts_child FOLDER...`.

Reads only config.json, or the header of a GGUF file. Prints a JSON list with three texts for each folder or file: the
reasons of all backends if none has the architecture, the reason why its backend is not installed, and the command that
installs it. All are empty for a model that runs. A separate process asks, because the daemon imports no backend.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ... import backends
from ...engine.errors import ModelRefused
from ...engine.files.model_files import ModelFiles, read_architecture
from ...engine.runner import Backend, Unavailable


def main(*folders: str) -> None:
    print(json.dumps([reasons_of(Path(folder)) for folder in folders]))


def reasons_of(folder: Path) -> tuple[str, str, str]:
    """(reason why no backend has the architecture of a model, reason why its backend is not installed, the command that
    installs it)."""
    try:
        files = read_architecture(folder)
    except ModelRefused as error:
        return str(error), "", ""
    refusal = _refusal(files)
    return (refusal, "", "") if refusal else ("", *_missing(files))


def _refusal(files: ModelFiles) -> str:
    reasons: dict[str, list[str]] = {}
    for name in backends.ORDER:
        accepts = getattr(backends.load(name), "accepts", None)  # a backend without a runner has only `probe`
        if accepts is None:
            continue
        reason = accepts(files)
        if not reason:
            return ""
        reasons.setdefault(reason, []).append(name)
    listed = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
    return f"no backend supports this model ({listed})"


def _missing(files: ModelFiles) -> tuple[str, str]:
    """The reason why no backend that reads a GGUF file is installed, and the command that installs one; else empty.

    A GGUF file has one backend, which is a package of its own. Other models are not asked about: the probes of their
    backends are slow, and the result changes with the devices of the machine.
    """
    if not files.gguf:
        return "", ""
    backends_of_model = [backend for backend in map(backends.load, backends.ORDER) if not _refuses(backend, files)]
    probes = [backend.probe() for backend in backends_of_model]
    missing = [probe for probe in probes if isinstance(probe, Unavailable)]
    if len(missing) < len(probes):
        return "", ""
    return "; ".join(probe.reason for probe in missing), next((probe.install for probe in missing if probe.install), "")


def _refuses(backend: Backend, files: ModelFiles) -> bool:
    accepts = getattr(backend, "accepts", None)  # a backend without a runner has only `probe`
    return accepts is None or bool(accepts(files))


if __name__ == "__main__":
    main(*sys.argv[1:])
