"""Installs llama.cpp for the GGUF models, in a process that compiles it for minutes."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable

from ... import children
from ...errors import InstallFailed

# The process runs make in a checkout, and pip elsewhere. The daemon imports no backend.
COMMAND = (sys.executable, "-P", "-c", "from localllm.backends.llamacpp_install import main; main()")
LAST_LINES = 12  # lines of the output in an error
MAX_LINE = 300  # characters
_STEP = re.compile(r"\[(\d+)/(\d+)\]")  # of a build with ninja
_CONTROLS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


async def install(report: Callable[[str, int, int], None]) -> None:
    """Install llama.cpp. A cancelled call ends the process and its children.

    `report` gets each line of the output, with the number of finished and of all steps of the compiler (0: unknown).
    Raises InstallFailed.
    """
    environment = {**children.environment(), "PIP_VERBOSE": "2", "PIP_NO_INPUT": "1", "PYTHONUNBUFFERED": "1"}
    try:
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            process_group=0,
        )
    except OSError as error:
        raise InstallFailed(f"cannot start the installation: {error}") from None
    last: deque[str] = deque(maxlen=LAST_LINES)
    try:
        async for line in _lines(process):
            last.append(line)
            report(line, *steps(line))
        code = await process.wait()
    finally:
        if process.returncode is None:
            await children.kill(process)
    if code:
        raise InstallFailed(f"the installation of llama.cpp failed with exit code {code}", hint="\n".join(last))


def steps(line: str) -> tuple[int, int]:
    """(finished, all) steps of the compiler in a line such as `[12/345] Building CXX object`; (0, 0): none."""
    match = _STEP.search(line)
    return (int(match[1]), int(match[2])) if match else (0, 0)


async def _lines(process: asyncio.subprocess.Process) -> AsyncIterator[str]:
    """The lines of the output that have text, without control characters. A long line is truncated."""
    assert process.stdout is not None
    unfinished = b""
    while data := await process.stdout.read(64 * 2**10):
        *complete, unfinished = re.split(rb"[\r\n]", (unfinished + data)[-(2**20) :])
        for line in complete:
            if text := _text(line):
                yield text
    if text := _text(unfinished):
        yield text


def _text(line: bytes) -> str:
    return _CONTROLS.sub("", os.fsdecode(line).encode("utf-8", "replace").decode()).strip()[:MAX_LINE]
