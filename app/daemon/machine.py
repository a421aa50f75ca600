"""Measures the device on which models run, once, in a child process."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from .. import children
from ..errors import WorkerDied
from ..frames import Machine

COMMAND = (sys.executable, "-P", "-m", "localllm.app.worker.machine_child")
SECONDS = 60.0  # maximum duration: a call into a broken driver may never return


class MachineProbe:
    """The result of the first probe; later calls return it without another probe."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._machine: Machine | None = None

    async def __call__(self) -> Machine:
        """The device of the preferred backend. All fields are empty if no backend works."""
        async with self._lock:
            if self._machine is None:
                self._machine = await _probe()
            return self._machine


async def _probe() -> Machine:
    try:
        output = (await children.run(COMMAND, SECONDS)).output
    except (TimeoutError, WorkerDied):
        output = b""
    return msgspec.json.decode(output, type=Machine) if output else Machine()
