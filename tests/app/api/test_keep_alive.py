"""The silence of event streams: at most the interval of keep_alive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.app.api import keep_alive
from localllm.app.api.events import EventStream, Report
from localllm.app.api.store import StoreRoutes

SECONDS = 0.1


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_alive, "SECONDS", SECONDS)


async def timed(chunks: AsyncIterator[bytes]) -> list[tuple[float, bytes]]:
    """The chunks with the times at which they are written."""
    loop = asyncio.get_running_loop()
    return [(loop.time(), chunk) async for chunk in chunks]


def check_silence(writes: list[tuple[float, bytes]]) -> None:
    assert max(later - earlier for (earlier, _), (later, _) in pairwise(writes)) < 1.5 * SECONDS


async def test_deadline_moves_with_each_write() -> None:
    deadline = keep_alive.Deadline()
    assert not deadline.passed
    with pytest.raises(TimeoutError):
        async with deadline.timeout():
            await asyncio.sleep(1)
    assert deadline.passed
    deadline.restart()
    assert not deadline.passed


async def test_work_without_reports() -> None:
    async def work(report: Report) -> int:
        report(1)
        await asyncio.sleep(0.45)
        return 2

    writes = await timed(EventStream(work).events())
    check_silence(writes)
    assert [data for _, data in writes] == [b"data: 1\n\n", *[keep_alive.COMMENT] * 4, b"data: 2\n\n"]


async def test_frequent_reports() -> None:
    async def work(report: Report) -> int:
        for number in range(30):
            report(number)
            await asyncio.sleep(0.01)
        return 0

    assert keep_alive.COMMENT not in [data for _, data in await timed(EventStream(work).events())]


@pytest.mark.parametrize("polling", [0.01, 10.0])
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
