"""Starts the daemon in the background from the command line, and waits until it accepts requests or fails."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
from typing import IO

import msgspec

from ..config import Settings
from ..errors import DaemonUnreachable
from ..frames import Fault

READY = b"{}"  # the daemon's message when it accepts requests; a Fault is the message of a failed start
START_SECONDS = 30
LAST_LINES = 5
COMMAND = (sys.executable, "-P", "-m", "localllm.app.daemon")


def start(settings: Settings) -> None:
    """Start a daemon with these settings; returns once it accepts requests.

    Raises the error of the daemon if it cannot start (PortTaken if another one runs), or DaemonUnreachable with the
    last lines of its output.
    """
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb") as answer, tempfile.TemporaryFile() as output:
        try:
            launcher = subprocess.Popen(
                [*COMMAND, "--ready-fd", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(theirs,),
                start_new_session=True,  # the daemon must survive the end of the terminal
            )
        finally:
            os.close(theirs)
        try:
            # The launcher forks the daemon and exits.
            launcher.communicate(msgspec.json.encode(settings), START_SECONDS)
            with selectors.DefaultSelector() as ready:
                ready.register(answer, selectors.EVENT_READ)
                if not ready.select(START_SECONDS):
                    raise TimeoutError
        except (TimeoutError, subprocess.TimeoutExpired):
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
            raise DaemonUnreachable(f"the daemon did not start within {START_SECONDS} s{_last_lines(output)}") from None
        outcome = answer.read()
        if not outcome:
            raise DaemonUnreachable(f"the daemon exited during its start{_last_lines(output)}")
    if outcome != READY:
        raise msgspec.json.decode(outcome, type=Fault).error()


def _last_lines(output: IO[bytes]) -> str:
    output.seek(0)
    lines = output.read().decode("utf-8", "replace").strip().splitlines()[-LAST_LINES:]
    return ": " + "\n".join(lines) if lines else ""
