"""Ctrl-C ends the program with exit code 130 and without a traceback, at every moment."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Starts the program. The process sends SIGINT to itself when the module NAME is imported.
AT_IMPORT = """
import os, signal, sys
from localllm.app.start import main

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == NAME:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.exit(main())
"""

AT_EXIT = """
import atexit, os, signal, sys
from localllm.app.start import main
atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.exit(main())
"""

IN_DESTRUCTOR = """
import os, signal, sys
from localllm.app import cli
from localllm.app.start import main

class Interrupt:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

def config(*_):
    Interrupt()
    print("goes on")

import localllm.app.commands.settings as settings
settings.config = config
sys.exit(main())
"""

BEFORE_THE_FIRST_STEP = """
import asyncio, os, signal, sys
from localllm.app.start import main
import localllm.app.commands.daemon

def run(coroutine):
    raise KeyboardInterrupt

asyncio.run = run
sys.exit(main())
"""


def ended(script: str, *args: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the program, without the line break that ends ^C."""
    command = [sys.executable, "-c", script, *args]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr.strip()


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("localllm.app.cli", "alias"),
        ("click", "alias"),
        ("localllm.app.parameters", "alias"),
        ("localllm.app.commands.console", "alias"),
        ("localllm.app.store.names", "alias"),
        ("localllm.app.commands.store", "alias"),
        ("localllm.app.commands.models", "list"),
        ("localllm.app.commands.pull", "pull org/repo"),
        ("localllm.app.commands.run", "run guide hi"),
        ("localllm.app.commands.chat", "chat guide"),
        ("localllm.app.commands.inspect", "inspect guide"),
        ("localllm.app.commands.doctor", "doctor"),
    ],
)
def test_ctrl_c_during_an_import(module: str, command: str) -> None:
    assert ended(AT_IMPORT.replace("NAME", repr(module)), *command.split()) == (130, "", "")


def test_ctrl_c_while_python_ends() -> None:
    code, _, errors = ended(AT_EXIT, "alias")
    assert (code, errors) == (130, "there are no aliases; for example: localllm alias small Qwen/Qwen3-0.6B")


def test_ctrl_c_in_a_destructor_is_not_lost() -> None:
    assert ended(IN_DESTRUCTOR, "config") == (130, "", "")


def test_ctrl_c_before_the_first_step_of_a_command() -> None:
    assert ended(BEFORE_THE_FIRST_STEP, "ps") == (130, "", "")


def test_a_program_that_ignores_ctrl_c_goes_on() -> None:
    script = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + AT_IMPORT
    code, _, errors = ended(script.replace("NAME", "'localllm.app.commands.console'"), "alias")
    assert (code, "there are no aliases" in errors) == (0, True)
