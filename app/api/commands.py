"""Runs commands of the store for clients, each in a child process: the daemon imports no backend, a child process may
crash on a hostile file, and the result is that of the command line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from .. import children
from ..errors import BY_CODE, AppError, InvalidRequest, WorkerDied

COMMAND = (sys.executable, "-P", "-m", "localllm.app.cli")
SECONDS = 120.0  # maximum duration: a hub may be slow
MAX_TEXT = 8192  # characters of all arguments
_FLAG = re.compile(r"'--([a-z-]+)'")  # the flag that an error of the command line is about


class _Error(msgspec.Struct, frozen=True):
    code: str
    message: str
    hint: str = ""


class _Reply(msgspec.Struct, frozen=True):
    error: _Error


async def run(
    command: str, *arguments: str, flags: Sequence[str] = (), param: str = "model", seconds: float = 0.0
) -> Any:
    """The JSON result of `localllm COMMAND --json FLAGS -- ARGUMENTS`.

    `param`: the field of the request that an error of the command is about. `seconds`: maximum duration; 0: SECONDS.
    Raises the error of the command, or WorkerDied if it crashes or takes longer.
    """
    seconds = seconds or SECONDS
    _check_text(" ".join((*arguments, *flags)), param)
    try:
        child = await children.run((*COMMAND, command, "--json", *flags, "--", *arguments), seconds)
    except TimeoutError:
        raise WorkerDied(f"localllm {command} gave no result within {seconds:g} s") from None
    if child.code >= 0 and child.output:  # some exit codes come with a result, such as 5: no backend runs the model
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(child.output)
    raise _error(command, child.errors, param)


def _check_text(text: str, param: str) -> None:
    """Raises InvalidRequest for a text that cannot be an argument of a process."""
    if len(text) > MAX_TEXT:
        raise InvalidRequest(f"{param} has more than {MAX_TEXT} characters", param=param)
    if not text.isprintable():
        raise InvalidRequest(f"{param} has control characters: {text[:200]!a}", param=param)


def _error(command: str, output: bytes, param: str) -> AppError:
    """The error in the last line of a command's standard error."""
    with suppress(msgspec.DecodeError, IndexError):
        error = msgspec.json.decode(output.splitlines()[-1], type=_Reply).error
        flag = _FLAG.search(error.message)
        return BY_CODE.get(error.code, AppError)(error.message, hint=error.hint, param=flag[1] if flag else param)
    return WorkerDied(f"localllm {command} crashed", hint="run it in a terminal to see the reason")
