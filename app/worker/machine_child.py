"""Describes the device of the preferred backend: `python -m localllm.app.worker.machine_child`.

Prints a Machine as JSON, or nothing if no backend works. A separate process probes: see backend_child.
"""

from __future__ import annotations

import sys

import msgspec

from ... import backends
from ...engine.errors import EngineError
from ..frames import Machine


def main() -> None:
    try:
        choice = backends.choose()
    except EngineError:
        return
    info = choice.info
    machine = Machine(
        backend=info.backend,
        device=info.name,
        memory=info.memory,
        free=info.free,
        bandwidth=backends.load(info.backend).read_bandwidth() or 0.0,
    )
    sys.stdout.buffer.write(msgspec.json.encode(machine))


if __name__ == "__main__":
    main()
