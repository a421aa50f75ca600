"""Child processes with a time limit."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from localllm.app import children
from localllm.app.errors import WorkerDied

from ..waiting import wait_until

# Starts a child that ignores SIGTERM, and writes its process id to the file argv[1].
PARENT = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(3600)
"""


def python(script: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", script, *arguments)


async def test_result_has_the_code_and_both_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_API_KEY", "secret")
    script = "import os, sys; print('LOCALLLM_API_KEY' in os.environ); print('e', file=sys.stderr); sys.exit(3)"
    assert await children.run(python(script), 30) == children.Ended(3, b"False\n", b"e\n")
    with pytest.raises(WorkerDied, match="cannot start"):
        await children.run(("no such program",), 30)


@pytest.mark.parametrize("cancel", [False, True])
async def test_process_that_does_not_end_is_killed_with_its_children(cancel: bool, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    running = asyncio.create_task(children.run(python(PARENT, str(file)), 60.0 if cancel else 6.0))
    await asyncio.to_thread(wait_until, lambda: file.exists() and bool(file.read_text()))
    child = psutil.Process(int(file.read_text()))
    parent = child.parent()
    if cancel:
        running.cancel()
    with pytest.raises(asyncio.CancelledError if cancel else TimeoutError):
        await running
    _, alive = await asyncio.to_thread(psutil.wait_procs, [child, parent], 100)
    assert alive == []


async def test_wait_for_a_killed_process_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that a driver holds does not end when it is killed."""
    monkeypatch.setattr(children, "END_SECONDS", 0.2)
    process = await asyncio.create_subprocess_exec(
        *python("import time; time.sleep(3600)"), stdout=asyncio.subprocess.PIPE, process_group=0
    )
    with monkeypatch.context() as patch:
        patch.setattr(children, "kill_group", lambda _pid: None)
        await children.kill(process)  # a wait without a limit hangs
    assert process.returncode is None
    children.kill_group(process.pid)
    await process.communicate()
