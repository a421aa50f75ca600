"""The installation of llama.cpp: its progress, its errors, its end with the client, and its route."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from localllm.app.api.body import ClientGone
from localllm.app.api.store_commands import StoreCommands
from localllm.app.errors import Forbidden, InstallFailed, Overloaded
from localllm.app.store import listing
from localllm.app.store.changes import installing
from localllm.app.store.changes.installing import LAST_LINES, MAX_LINE, install, steps


def running(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Replace the command."""
    monkeypatch.setattr(installing, "COMMAND", ("sh", "-c", script))


async def test_each_line_is_reported_with_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    running(monkeypatch, r"printf 'begin\n\n\033[1m[1/3] cc\033[0m\r[2/3] link\nlast'; echo err >&2")
    lines: list[tuple[str, int, int]] = []
    await install(lambda *progress: lines.append(progress))
    assert lines == [("begin", 0, 0), ("[1/3] cc", 1, 3), ("[2/3] link", 2, 3), ("lasterr", 0, 0)]


async def test_failure_has_the_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    running(monkeypatch, f"seq 100; printf '%0{MAX_LINE + 9}d\\n' 0; echo no compiler; exit 2")
    with pytest.raises(InstallFailed, match="failed with exit code 2") as error:
        await install(lambda *_: None)
    lines = error.value.hint.split("\n")
    assert len(lines) == LAST_LINES
    assert lines[-3:] == ["100", "0" * MAX_LINE, "no compiler"]


async def test_command_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "COMMAND", ("/nowhere/sh",))
    with pytest.raises(InstallFailed, match="cannot start"):
        await install(lambda *_: None)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the test reads /proc")
async def test_cancelled_call_ends_the_process_and_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    child = f"{shlex.quote(sys.executable)} -c 'import time; time.sleep(600)'"
    running(monkeypatch, f"{child} & echo $$ $! > {shlex.quote(str(pids))}; echo begun; wait")
    begun = asyncio.Event()
    task = asyncio.create_task(install(lambda *_: begun.set()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for pid in pids.read_text().split():
        assert await ends(int(pid))


async def ends(pid: int) -> bool:
    """True as soon as a process has ended."""
    for _ in range(1000):
        if has_ended(pid):
            return True
        await asyncio.sleep(0.01)
    return False


def has_ended(pid: int) -> bool:
    """A zombie has ended, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


@pytest.mark.parametrize(
    ("line", "found"),
    [("[12/345] Building CXX object", (12, 345)), ("  [1/2] x", (1, 2)), ("[ 5%] Building", (0, 0)), ("done", (0, 0))],
)
def test_steps_of_ninja(line: str, found: tuple[int, int]) -> None:
    assert steps(line) == found


def request(*, is_local: bool = True) -> Request:
    return Request({"type": "http", "method": "POST", "server": ("socket", None if is_local else 1), "headers": []})


async def test_route_sends_progress_and_then_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    running(monkeypatch, "echo '[1/2] cc'")
    asked: list[bool] = []
    monkeypatch.setattr(listing, "listed", lambda *, wait: asked.append(wait))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    response = await StoreCommands(None, 1000).install(request())  # type: ignore[arg-type]
    await response({"type": "http"}, receive, send)
    data = [message["body"] for message in sent if message["type"] == "http.response.body"]
    assert data[:2] == [
        b'data: {"line":"[1/2] cc","done":1,"total":2}\n\n',
        b'data: {"package":"llama.cpp"}\n\n',
    ]
    assert asked == [True]


async def test_route_runs_once_and_for_local_clients_only(monkeypatch: pytest.MonkeyPatch) -> None:
    running(monkeypatch, "echo begun; sleep 600")
    commands = StoreCommands(None, 1000)  # type: ignore[arg-type]
    with pytest.raises(Forbidden):
        await commands.install(request(is_local=False))
    begun = asyncio.Event()
    gone = asyncio.Event()

    async def send(message: Any) -> None:
        if message.get("body"):
            begun.set()

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    response = await commands.install(request())
    task = asyncio.create_task(response({"type": "http"}, receive, send))
    await begun.wait()
    with pytest.raises(Overloaded):
        await commands.install(request())
    gone.set()
    with pytest.raises(ClientGone):
        await task
    while True:
        try:
            await commands.install(request())
            break
        except Overloaded:
            await asyncio.sleep(0)


def test_command_of_a_checkout_runs_make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text("#!/bin/sh\necho make $*; pwd\n")
    make.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    script = installing.COMMAND[-1].replace("main()", "sys.prefix = str(llamacpp_install.ROOT / '.venv'); main()")
    script = f"import sys; from localllm.backends import llamacpp_install; {script}"
    done = subprocess.run([*installing.COMMAND[:-1], script], capture_output=True, text=True)
    assert (done.stdout.split("\n")[0], done.stderr) == ("make build GGUF=1", "")
