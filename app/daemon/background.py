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

READY = b"{}"  # the daemon sends it when it accepts requests; after a failed start it sends a Fault
START_SECONDS = 30
LAST_LINES = 5
COMMAND = (sys.executable, "-P", "-m", "localllm.app.daemon")


def start(settings: Settings) -> None:
    """Start a daemon with these settings; returns when the daemon accepts requests.

    Raises the error of a daemon that cannot start (PortTaken if another daemon runs), or DaemonUnreachable with the
    last lines of the daemon's output.
    """
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as result, tempfile.TemporaryFile() as output:
        try:
            launcher = subprocess.Popen(
                [*COMMAND, "--ready-fd", str(write_end)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(write_end,),
                start_new_session=True,  # the daemon must continue when the terminal is closed
            )
        finally:
            os.close(write_end)
        try:
            # The launcher forks the daemon and exits.
            launcher.communicate(msgspec.json.encode(settings), START_SECONDS)
            with selectors.DefaultSelector() as ready:
                ready.register(result, selectors.EVENT_READ)
                if not ready.select(START_SECONDS):
                    raise TimeoutError
        except (TimeoutError, subprocess.TimeoutExpired):
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
            raise DaemonUnreachable(f"the daemon did not start within {START_SECONDS} s{_last_lines(output)}") from None
        outcome = result.read()
        if not outcome:
            raise DaemonUnreachable(f"the daemon exited during its start{_last_lines(output)}")
    if outcome != READY:
        raise msgspec.json.decode(outcome, type=Fault).error()


def _last_lines(output: IO[bytes]) -> str:
    output.seek(0)
    lines = output.read().decode("utf-8", "replace").strip().splitlines()[-LAST_LINES:]
    return ": " + "\n".join(lines) if lines else ""
