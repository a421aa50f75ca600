"""Client libraries unchanged, each in a process with the packages of clients/requirements.txt."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .agent_model import ANSWER, serve
from .conftest import Daemon

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / "build/clients/bin/python"
PROGRAMS = Path(__file__).parent / "clients/programs.py"
NAMES = re.findall(r"^def ([a-z]\w*)\(\) -> str", PROGRAMS.read_text("utf-8"), re.MULTILINE)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="make build/clients/.made installs the client libraries"),
]


@pytest.fixture(scope="module")
def daemon(short_folder: Callable[[], Path]) -> Iterator[Daemon]:
    yield from serve(short_folder())


@pytest.mark.parametrize("name", NAMES)
def test_program_prints_the_answer(daemon: Daemon, name: str) -> None:
    env = os.environ | {"OPENAI_API_KEY": "x", "ANTHROPIC_API_KEY": "x"}
    program = subprocess.run(
        [PYTHON, PROGRAMS, name, daemon.url], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert program.stdout.splitlines()[-1:] == [ANSWER], program.stderr
