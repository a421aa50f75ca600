"""The program `localllm`. Ctrl-C ends it with exit code 130 and without a traceback at any moment: while Python imports
modules, while a command runs, and while Python ends."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click

INTERRUPTED = 130  # 128 + SIGINT: the exit code that shells use for Ctrl-C


def main() -> int:
    """Run the command line of this process. Returns the exit code."""
    sys.unraisablehook = _end_if_interrupted
    # A Ctrl-C before the first step of a command causes this warning.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    with _ending_at_once():
        from .cli import cli
    code = run(cli, sys.argv[1:])
    _end_at_once()  # Python waits for threads, and runs the functions of atexit
    return code


def run(command: click.Command, args: list[str]) -> int:
    """Run a command line. Returns the exit code."""
    with _ending_at_once():
        from .commands.console import run_command
    return run_command(command, args)


@contextmanager
def _ending_at_once() -> Iterator[None]:
    """Inside, Ctrl-C ends the process. A program that ignores Ctrl-C, for example in the background, goes on."""
    previous = signal.getsignal(signal.SIGINT)
    _end_at_once()
    yield
    signal.signal(signal.SIGINT, previous)


def _end_at_once() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


def _end_if_interrupted(unraisable: sys.UnraisableHookArgs) -> None:
    """A Ctrl-C inside a destructor would be printed, and lost: the command would go on."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        os._exit(INTERRUPTED)
    sys.__unraisablehook__(unraisable)
