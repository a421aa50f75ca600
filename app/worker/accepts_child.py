"""Asks every backend if it has the architectures of models: `python -m localllm.app.worker.accepts_child FOLDER...`.

Reads only config.json. Prints a JSON list with one text for each folder: empty if a backend has the architecture,
otherwise the reasons of all backends. A separate process asks, because the daemon imports no backend.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ... import backends
from ...engine.errors import ModelRefused
from ...engine.modelfiles import read_architecture


def main(*folders: str) -> None:
    print(json.dumps([refusal(Path(folder)) for folder in folders]))


def refusal(folder: Path) -> str:
    """The reason why no backend has the architecture of a model; empty if one has it."""
    try:
        files = read_architecture(folder)
    except ModelRefused as error:
        return str(error)
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


if __name__ == "__main__":
    main(*sys.argv[1:])
