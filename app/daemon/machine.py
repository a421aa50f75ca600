"""Measures the device on which models run, once, in a child process."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

import msgspec

from ..frames import Machine
from .process import worker_environment

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
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=worker_environment(),
        process_group=0,
    )
    output = b""
    try:
        async with asyncio.timeout(SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            process.kill()
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await process.communicate()
    return msgspec.json.decode(output, type=Machine) if output else Machine()
