"""The programs in examples/ run with the built-in model, offline, and are short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.app import config
from localllm.app.daemon.process import COMMAND
from tests.app.daemon.conftest import Daemon

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
OUTPUT = {"chat": "localllm stop", "tools": "free_disk_space('/", "engine": "localllm list"}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with tempfile.TemporaryDirectory(prefix="lll-") as folder:
        env = {"TEST_WORKER": json.dumps(COMMAND)}
        daemon = Daemon(Path(folder), env=env, backend="cpu", cache_mib=16, max_rows=4, threads=1)
        yield daemon.port
        assert daemon.stop() == 0, daemon.log


def test_examples_are_three_short_programs() -> None:
    programs = {file.stem: file.read_text("utf-8") for file in EXAMPLES.glob("*.py")}
    assert programs.keys() == OUTPUT.keys()
    assert all(len(text.splitlines()) <= 30 for text in programs.values())


@pytest.mark.parametrize("name", OUTPUT)
def test_an_example_answers(name: str, port: int) -> None:
    text = (EXAMPLES / f"{name}.py").read_text("utf-8").replace(str(config.DEFAULT_PORT), str(port))
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=100, env=os.environ | {"NO_PROXY": "*"}
    )
    assert done.returncode == 0, done.stderr
    assert OUTPUT[name] in done.stdout
