"""Starting the daemon from our own client: detached, waited for, and told about when it dies at once."""

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
from .frames import Fault

READY = b"{}"  # what a daemon says that takes requests; else it says a Fault
START_SECONDS = 30
LAST_LINES = 5
COMMAND = (sys.executable, "-P", "-m", "localllm.app.daemon")


def start(settings: Settings) -> None:
    """Start a daemon with these settings; returns once it takes requests.

    Raises the daemon's own error when it refuses (PortTaken when there is one already), or DaemonUnreachable with
    its last words.
    """
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb") as answer, tempfile.TemporaryFile() as words:
        try:
            launcher = subprocess.Popen(
                [*COMMAND, "--ready-fd", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=words,
                stderr=words,
                pass_fds=(theirs,),
                start_new_session=True,  # the terminal that started it may close
            )
        finally:
            os.close(theirs)
        try:
            launcher.communicate(msgspec.json.encode(settings), START_SECONDS)  # the daemon is its child, and lives on
            with selectors.DefaultSelector() as ready:
                ready.register(answer, selectors.EVENT_READ)
                if not ready.select(START_SECONDS):
                    raise TimeoutError
        except (TimeoutError, subprocess.TimeoutExpired):
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
            raise DaemonUnreachable(f"the daemon did not start within {START_SECONDS} s{_last(words)}") from None
        said = answer.read()
        if not said:
            raise DaemonUnreachable(f"the daemon exited during its start{_last(words)}")
    if said != READY:
        raise msgspec.json.decode(said, type=Fault).error()


def _last(words: IO[bytes]) -> str:
    words.seek(0)
    lines = words.read().decode("utf-8", "replace").strip().splitlines()[-LAST_LINES:]
    return ": " + "\n".join(lines) if lines else ""
