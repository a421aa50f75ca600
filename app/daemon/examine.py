"""Inspects and measures models for clients, in a child process: the daemon imports no backend, and a child process may
crash on a hostile file."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from typing import Any

import msgspec

from ..errors import BY_CODE, AppError, InvalidRequest, WorkerDied
from ..store import names
from .process import worker_environment

COMMAND = (sys.executable, "-P", "-m", "localllm.app.cli")
SECONDS = 120.0  # maximum duration: a hub may be slow
RESULTS = (0, 5)  # exit codes with a result; 5: no backend runs the model


class _Error(msgspec.Struct, frozen=True):
    code: str
    message: str
    hint: str = ""


class _Reply(msgspec.Struct, frozen=True):
    error: _Error


async def inspect(name: str) -> dict[str, Any]:
    """The result of `localllm inspect NAME --json`: see store.inspection.Inspection.

    Raises InvalidRequest for a path, or the error of the command.
    """
    return await _run("inspect", name)


async def fit(
    name: str, *, context: int = 0, parallel: int = 1, quant: str | None = None, backend: str | None = None
) -> list[dict[str, Any]]:
    """The entries of `localllm fit NAME --json`: see store.fit.Fit. Raises as `inspect` does."""
    flags = [f"--context={context}", f"--parallel={parallel}"]
    flags += [f"--quant={quant}"] if quant else []
    flags += [f"--backend={backend}"] if backend else []
    result = await _run("fit", name, *flags)
    entries: list[dict[str, Any]] = result["fits"]
    return entries


async def _run(command: str, name: str, *flags: str) -> dict[str, Any]:
    if isinstance(names.parse(name), names.LocalPath):  # a client must not learn which files exist
        raise InvalidRequest(f"{name[:200]!r} is a path; clients name models by their ids", param="model")
    child = await asyncio.create_subprocess_exec(
        *COMMAND,
        command,
        "--json",
        *flags,
        "--",
        name,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=worker_environment(),
        process_group=0,
    )
    try:
        async with asyncio.timeout(SECONDS):
            output, errors = await child.communicate()
    except TimeoutError:
        raise WorkerDied(f"localllm {command} gave no result within {SECONDS:g} s") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode in RESULTS and output:
        result: dict[str, Any] = msgspec.json.decode(output)
        return result
    raise _error(command, errors)


def _error(command: str, output: bytes) -> AppError:
    """The error in the last line of a command's standard error."""
    with suppress(msgspec.DecodeError, IndexError):
        error = msgspec.json.decode(output.splitlines()[-1], type=_Reply).error
        return BY_CODE.get(error.code, AppError)(error.message, hint=error.hint, param="model")
    return WorkerDied(f"localllm {command} crashed", hint="run it in a terminal to see the reason")
