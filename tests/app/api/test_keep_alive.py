"""The silence of event streams: at most the interval of keep_alive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.app.api import exchange, keep_alive
from localllm.app.api.answers import ChatAnswer, Head
from localllm.app.api.events import EventStream, Report
from localllm.app.api.store import StoreRoutes
from localllm.app.frames import Finished, Piece

from ...virtual_time import in_virtual_time, now
from .test_exchange import tally

SECONDS = 0.1


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_alive, "SECONDS", SECONDS)


async def timed(chunks: AsyncIterator[bytes]) -> list[tuple[float, bytes]]:
    """The chunks with the virtual times at which they are written."""
    return [(now(), chunk) async for chunk in chunks]


def check_silence(writes: list[tuple[float, bytes]]) -> None:
    assert max(later - earlier for (earlier, _), (later, _) in pairwise(writes)) <= SECONDS + 1e-9


@in_virtual_time
async def test_deadline_moves_with_each_write() -> None:
    deadline = keep_alive.Deadline()
    assert not deadline.passed
    with pytest.raises(TimeoutError):
        async with deadline.timeout():
            await asyncio.sleep(1)
    assert deadline.passed
    deadline.restart()
    assert not deadline.passed


@in_virtual_time
async def test_work_without_reports() -> None:
    async def work(report: Report) -> int:
        report(1)
        await asyncio.sleep(0.45)
        return 2

    writes = await timed(EventStream(work).events())
    check_silence(writes)
    assert [data for _, data in writes] == [b"data: 1\n\n", *[keep_alive.COMMENT] * 4, b"data: 2\n\n"]


@in_virtual_time
async def test_frequent_reports() -> None:
    async def work(report: Report) -> int:
        for number in range(30):
            report(number)
            await asyncio.sleep(0.01)
        return 0

    assert keep_alive.COMMENT not in [data for _, data in await timed(EventStream(work).events())]


@pytest.mark.parametrize("polling", [0.01, 10.0])
@in_virtual_time
async def test_downloads_without_progress(polling: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.app.api.store.EVENT_SECONDS", polling)
    job = SimpleNamespace(state="running")
    jobs: Any = SimpleNamespace(list=lambda: [SimpleNamespace(**vars(job))])
    monkeypatch.setattr("localllm.app.api.store.event", lambda value: b"event")
    routes = StoreRoutes(None, jobs, 1)  # type: ignore[arg-type]
    reading = asyncio.create_task(timed(routes._events()))
    await asyncio.sleep(0.45)
    job.state = "done"
    writes = await reading
    check_silence(writes)
    assert [data for _, data in writes][:4] == [b"event", *[keep_alive.COMMENT] * 3]
    assert writes[-1][1] == b"event"


async def watched(made: exchange._Tally, choices: int = 1) -> list[tuple[float, bytes]]:
    """The times and the bytes of the writes of a stream."""
    writes: list[tuple[float, bytes]] = []

    async def send(message: Any) -> None:
        writes.append((now(), message.get("body", b"head")))

    await exchange._stream(
        ChatAnswer(Head("id", "m", "f"), choices, logprobs=False, usage=False), made, send, lambda error: error
    )
    return writes


@pytest.mark.parametrize("gap", [0.005, 0.5])
@in_virtual_time
async def test_stream_has_no_longer_silence_than_the_interval(monkeypatch: pytest.MonkeyPatch, gap: float) -> None:
    """During a long prompt nothing arrives; in a long tool call pieces arrive that have no data."""
    monkeypatch.setattr(keep_alive, "SECONDS", 0.1)
    made = tally()
    watching = asyncio.create_task(watched(made))
    for _ in range(round(0.5 / gap)):
        await asyncio.sleep(gap)
        made._stream.put(Piece(id="a", tokens=1))
    made._stream.put(Piece(id="a", text="x", finish="stop"))
    made._stream.put(Finished(id="a"))
    writes = await watching
    check_silence(writes)
    comments = [data for _, data in writes if data == b": keep-alive\n\n"]
    assert 3 <= len(comments) <= 5


@in_virtual_time
async def test_tight_flow_of_data_has_no_keep_alives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_alive, "SECONDS", 0.2)
    made = tally()
    watching = asyncio.create_task(watched(made))
    for _ in range(50):
        await asyncio.sleep(0.01)
        made._stream.put(Piece(id="a", text="x"))
    made._stream.put(Piece(id="a", finish="stop"))
    made._stream.put(Finished(id="a"))
    assert not any(data.startswith(b":") for _, data in await watching)
