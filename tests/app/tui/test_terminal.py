"""The UI as a process in a real terminal: how it quits."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
from pathlib import Path
os.login_tty(int(sys.argv[1]))
from localllm.app.config import Settings
from localllm.app.tui.app import ChatApp
from localllm.app.tui.conversation import Conversation
from localllm.app.tui.history.store import Store
from tests.app.tui.fake_client import FakeClient
client = FakeClient(["The answer."])
ChatApp(Settings(), Conversation("guide", "", {}), connect=client.connect, store=Store(Path(sys.argv[2]))).run()
assert client.closed
"""


class Terminal:
    def __init__(self, history: Path) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(slave), str(history)],
            pass_fds=(slave,),
            cwd=Path(__file__).parents[3],
            env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"},
        )
        os.close(slave)

    def read_until(self, words: bytes) -> None:
        output = b""
        while words not in output:
            output += os.read(self.master, 4096)


@pytest.mark.parametrize("how", ["the terminal is closed", "SIGTERM"])
def test_ui_quits_and_saves_the_conversation(how: str, tmp_path: Path) -> None:
    history = tmp_path / "history.sqlite3"
    terminal = Terminal(history)
    try:
        terminal.read_until(b"sk something")
        os.write(terminal.master, b"hi\r")
        terminal.read_until(b"answer.")
        if how == "SIGTERM":
            terminal.process.send_signal(signal.SIGTERM)
            terminal.read_until(b"\x1b[?1049l")  # the terminal shows its earlier screen again
        os.close(terminal.master)
        assert terminal.process.wait(100) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
    assert b"The answer." in history.read_bytes()
