"""Limits and cancellation of expensive requests."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from localllm.app.api import events, file_work, keep_alive
from localllm.app.api.admin import FileProgress, ImportBody
from localllm.app.api.body import ClientGone
from localllm.app.api.events import EventStream
from localllm.app.api.exchange import unless_gone
from localllm.app.api.file_work import FileWork, Stopped
from localllm.app.api.places import Places
from localllm.app.errors import Overloaded, StorageFailed
from localllm.app.store import names
from localllm.app.store.local import finding
from localllm.app.store.local.refs import ModelRef
from localllm.app.store.local.verify import verify

from ..tiny_qwen import write_model


async def test_places_let_some_run_and_some_wait() -> None:
    places = Places("test", running=2, waiting=1)
    release = asyncio.Event()
    running: list[int] = []

    async def work(number: int) -> None:
        async with places.enter():
            running.append(number)
            await release.wait()

    tasks = [asyncio.create_task(work(number)) for number in range(4)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert running == [0, 1]
    with pytest.raises(Overloaded, match="3 requests to test run or wait"):
        await tasks[3]
    tasks[2].cancel()
    await asyncio.sleep(0)
    places.check()
    release.set()
    await asyncio.gather(*tasks[:2])
    async with places.enter():
        pass


async def test_thread_ends_when_the_client_disconnects() -> None:
    ended = threading.Event()
    sent: list[Any] = []

    def endless(progress: file_work.Progress) -> None:
        try:
            while True:
                progress("file", 1, 2)
                time.sleep(0.001)
        except Stopped:
            ended.set()
            raise

    files = FileWork()
    gone = asyncio.Event()

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 3:
            gone.set()

    response = EventStream(lambda report: files.run(endless, report))
    with pytest.raises(ClientGone):
        await response({"type": "http"}, receive, send)
    assert await asyncio.to_thread(ended.wait, 10)
    assert sent[1]["body"] == b'data: {"file":"file","done":1,"total":2}\n\n'
    assert len(sent) < 6, "events are rare, however often the work reports"


async def test_work_that_waits_ends_when_the_client_disconnects() -> None:
    """A request that disconnects before its turn does not occupy a thread."""
    files = FileWork()
    release = threading.Event()

    def busy(progress: file_work.Progress) -> None:
        release.wait(100)

    running = [asyncio.create_task(files.run(busy, lambda _: None)) for _ in range(file_work.RUNNING)]
    waiting = [asyncio.create_task(files.run(busy, lambda _: None)) for _ in range(file_work.WAITING)]
    await asyncio.sleep(0.01)
    with pytest.raises(Overloaded):
        await files.run(busy, lambda _: None)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    release.set()
    await asyncio.gather(*running)
    files.places.check()


async def test_events_end_with_the_error_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_alive, "SECONDS", 0.01)

    async def work(report: events.Report) -> object:
        report(FileProgress("a", 1, 2))
        await asyncio.sleep(0.03)
        raise ValueError("secret")

    chunks = [chunk async for chunk in EventStream(work).events()]
    assert chunks[0] == b'data: {"file":"a","done":1,"total":2}\n\n'
    assert keep_alive.COMMENT in chunks
    assert b"internal_error" in chunks[-1]
    assert b"secret" not in chunks[-1]


async def test_result_comes_before_the_disconnect() -> None:
    async def receive() -> Any:
        return await asyncio.Event().wait()

    async def work() -> int:
        return 7

    assert await unless_gone(receive, work()) == 7


def test_unreadable_file_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = tmp_path / ("a" * 64)
    blob.write_bytes(b"x")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to(blob)

    def refuse(*_: object) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StorageFailed, match="Input/output error"):
        verify(ModelRef(id="m", path=snapshot), lambda *_: None)


@pytest.mark.parametrize("calls", [0, 1, 3])
def test_import_that_is_stopped_leaves_nothing(calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    write_model(tmp_path / "tiny")
    body = ImportBody(path=str(tmp_path / "tiny"), name="mine", copy=True)
    seen: list[str] = []

    def progress(file: str, done: int, total: int) -> None:
        if len(seen) == calls:
            raise Stopped
        seen.append(file)

    with pytest.raises(Stopped):
        file_work.import_folder(body, progress)
    assert finding.find_model("local/mine") is None
    assert not names.repo_folder("local/mine").exists()
    assert file_work.import_folder(body, lambda *_: None).id == "local/mine"
