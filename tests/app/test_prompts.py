"""The questions of commands on a terminal: Ctrl-C, the end of the input, no, and yes."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.app import paths
from localllm.app.store import resolved
from localllm.app.store.local import finding

from .hub import Hub, model_files, serving
from .store.local.test_snapshots import ADAPTER, WHOLE, make

# The child of forkpty executes another program at once.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

SECONDS = 100  # without output; a hang
CTRL_C = b"\x03"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub({"org/m": model_files()})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        yield hub


def answer(args: list[str], keys: bytes) -> tuple[int, str]:
    """Run a command on a terminal, and press keys at its question. Returns the exit code and the screen."""
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-m", "localllm.app.cli", *args])
    screen = b""
    is_answered = False
    silent = 0
    while silent < SECONDS:
        if not select.select([terminal], [], [], 1.0)[0]:
            silent += 1
            if is_answered and keys == CTRL_C:  # the first one came before the process waited for input
                os.write(terminal, keys)
            continue
        try:
            output = os.read(terminal, 4096)
        except OSError:  # Linux reports the end of a terminal as an error
            break
        if not output:
            break
        screen += output
        if not is_answered and (b"[y/N]: " in screen or b"[Y/n]: " in screen):
            os.write(terminal, keys)
            is_answered = True
    else:
        os.kill(child, signal.SIGKILL)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert is_answered, screen
    return os.waitstatus_to_exitcode(status), screen.decode()


def store_unused() -> Path:
    blob = paths.hub_cache_dir() / "models--org--whole" / "blobs" / "unused"
    blob.write_bytes(b"x")
    os.utime(blob, (0, 0))
    return blob


@pytest.mark.parametrize(
    ("keys", "code", "words"),
    [
        pytest.param(CTRL_C, 130, "", id="Ctrl-C"),
        pytest.param(b"\x04", 130, "", id="Ctrl-D", marks=pytest.mark.slow),
        pytest.param(b"n\n", None, "nothing", id="no"),
        pytest.param(b"maybe\nn\n", None, "invalid input", id="unclear", marks=pytest.mark.slow),
    ],
)
def test_question_without_yes_changes_nothing(hub: Hub, keys: bytes, code: int | None, words: str) -> None:
    make("org/whole", WHOLE)
    make("org/lora", ADAPTER)
    unused = store_unused()
    commands = [["pull", "org/m"], ["rm", "org/whole"], ["adapters", "rm", "org/lora"], ["prune"]]
    for args in commands:
        exit_code, screen = answer(args, keys)
        is_prune = args == ["prune"]
        assert exit_code == (code if code is not None else 0 if is_prune else 1), (args, screen)
        assert words in screen.lower() or is_prune, (args, screen)
        assert "Traceback" not in screen
        assert screen.endswith("\n"), (args, screen)
    assert finding.find("org/whole") is not None
    assert resolved.adapter("org/lora").id == "org/lora"
    assert finding.find("org/m") is None
    assert unused.exists()
    assert not any("/resolve/" in path for _, path in hub.log)


def test_questions_have_the_size_and_yes_carries_them_out(hub: Hub) -> None:
    code, screen = answer(["pull", "org/m"], b"\n")
    assert (code, "Download 293.8 KiB?" in screen) == (0, True)
    assert finding.find("org/m") is not None
    code, screen = answer(["rm", "org/m"], b"y\n")
    assert (code, "Delete org/m and free 293." in screen) == (0, True)
    assert finding.find("org/m") is None
