"""Asks every backend if it has the architecture of a model: `python -m localllm.app.worker.accepts_child FOLDER`.

Reads only config.json. Prints nothing if a backend has the architecture, otherwise the reasons of all backends. A
separate process asks, because the daemon imports no backend.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ... import backends
from ...engine.modelfiles import read_architecture


def main(folder: str) -> None:
    files = read_architecture(Path(folder))
    reasons: dict[str, list[str]] = {}
    for name in backends.ORDER:
        accepts = getattr(backends.load(name), "accepts", None)  # a backend without a runner has only `probe`
        if accepts is None:
            continue
        reason = accepts(files)
        if not reason:
            return
        reasons.setdefault(reason, []).append(name)
    print("; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items()))


if __name__ == "__main__":
    main(*sys.argv[1:])
