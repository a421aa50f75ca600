"""The replies of a worker to one request."""

from __future__ import annotations

import asyncio

import pytest

from localllm.app.api import stream
from localllm.app.api.stream import Stream
from localllm.app.errors import ModelNotFound, Overloaded, WorkerDied
from localllm.app.frames import Failed, Fault, Finished, Piece, PieceLogprob, Started

from ..samples import model_info


def made(*names: str) -> tuple[Stream, list[Stream]]:
    """A stream for requests with these ids, and the list of closed streams."""
    closed: list[Stream] = []
    return Stream(model_info(), names, len(names), closed.append), closed


async def test_started_waits_for_every_frame() -> None:
    both, closed = made("a", "b")
    starting = asyncio.create_task(both.started())
    both.put(Started(id="a", prompt_tokens=2))
    await asyncio.sleep(0)
    assert not starting.done()
    both.put(Started(id="b", prompt_tokens=3))
    await starting
    assert (both.prompt_tokens, both.running, closed) == (5, {"a", "b"}, [])


async def test_started_ends_at_the_first_reply() -> None:
    """A later error ends the answer after the replies that arrived before."""
    both, _ = made("a", "b")
    piece = Piece(id="a", text="x")
    both.put(piece)
    both.put(Failed(id="b", fault=Fault(code="worker_died", message="gone")))
    await both.started()
    assert await both.take() == [piece]
    with pytest.raises(WorkerDied):
        await both.take()
    assert both.running == {"a"}


async def test_reply_without_a_start_ends_the_stream() -> None:
    one, _ = made("a")
    one.put(Finished(id="a", cancelled=True))
    await one.started()
    assert one.running == set()
    assert len(await one.take()) == 1
    assert await one.take() == []


async def test_take_waits_for_a_reply() -> None:
    one, _ = made("a")
    for frame in (Piece(id="a", text="x"), Finished(id="a")):
        reading = asyncio.create_task(one.take())
        for _ in range(3):
            one.put(Started(id="a", prompt_tokens=1))
            await asyncio.sleep(0)
        assert not reading.done()
        one.put(frame)
        assert await reading == [frame]


async def test_error_wakes_the_reader() -> None:
    one, _ = made("a")
    waiting = [asyncio.create_task(one.take()), asyncio.create_task(one.started())]
    await asyncio.sleep(0)
    one.fail(WorkerDied("gone"))
    for task in waiting:
        with pytest.raises(WorkerDied):
            await asyncio.wait_for(task, 100)


async def test_first_error_is_raised() -> None:
    one, _ = made("a")
    one.fail(ModelNotFound("first"))
    one.fail(WorkerDied("second"))
    for reading in (one.started(), one.take()):
        with pytest.raises(ModelNotFound, match="first"):
            await reading


async def test_unread_replies_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts unread pieces, their log-probabilities, and the alternatives of each."""
    monkeypatch.setattr(stream, "MAX_UNREAD", 8)
    top = PieceLogprob(token="t", id=1, bytes=[], logprob=-1.0)
    heavy = Piece(id="a", logprobs=[PieceLogprob(token="t", id=1, bytes=[], logprob=-1.0, top=[top, top])])  # 4
    one, closed = made("a")
    for _ in range(2):
        one.put(heavy)
        one.put(heavy)
        assert closed == []
        assert len(await one.take()) == 2
    for _ in range(2):
        one.put(heavy)
    for _ in range(2):
        one.put(Piece(id="a"))
    assert closed == [one], "closed once"
    assert len(await one.take()) == 4
    with pytest.raises(Overloaded):
        await one.take()


async def test_exit_closes_the_stream() -> None:
    one, closed = made("a")
    async with one:
        assert closed == []
    assert closed == [one]
