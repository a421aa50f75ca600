"""Child processes with a time limit, for work that may hang or crash: broken drivers, hostile files, slow hubs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from .config import PREFIX
from .errors import WorkerDied

END_SECONDS = 1.0  # maximum wait for a killed process: a driver may delay its end


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a process that has ended."""

    code: int  # exit code; negative: the number of the signal that ended the process
    output: bytes
    errors: bytes


async def run(command: Sequence[str], seconds: float, data: bytes = b"") -> Ended:
    """Run a command in a process group of its own. `data`: its standard input.

    Kills the group if the process runs longer than `seconds`, or if the caller is cancelled. Raises TimeoutError, or
    WorkerDied if the process cannot start.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment(),
            process_group=0,
        )
    except OSError as error:
        raise WorkerDied(f"cannot start a process: {error}") from None
    try:
        async with asyncio.timeout(seconds):
            output, errors = await process.communicate(data)
    finally:
        if process.returncode is None:
            await kill(process)
    assert process.returncode is not None
    return Ended(process.returncode, output, errors)


async def kill(process: asyncio.subprocess.Process) -> None:
    """Kill a process and its children. Returns after its end, or after END_SECONDS."""
    kill_group(process.pid)
    with suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            await process.communicate()


def kill_group(pid: int) -> None:
    """Kill the process group of a process: the process and its child processes."""
    # ProcessLookupError: the group has no process any more. On macOS, a zombie causes PermissionError.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def environment() -> dict[str, str]:
    """The environment of this process without the API key of the daemon."""
    return {name: value for name, value in os.environ.items() if name != f"{PREFIX}API_KEY"}
