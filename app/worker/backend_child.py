"""Probes if a backend can run a model: `python -m localllm.app.worker.backend_child BACKEND MODEL FOLDER`.

Prints nothing if the backend can run the model, otherwise a Fault as JSON. A separate process probes, because the
daemon imports no backend: some backends start a driver to probe the machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from ... import backends
from ...engine.errors import EngineError
from ...engine.files.model_files import read_model
from ..frames import Fault
from .faults import app_error, internal_error


def main(backend: str, model: str, folder: str) -> None:
    try:
        backends.choose(backend, read_model(Path(folder), model))
    except EngineError as error:
        fault = Fault.of(app_error(error) or internal_error())
        sys.stdout.buffer.write(msgspec.json.encode(fault))


if __name__ == "__main__":
    main(*sys.argv[1:])
