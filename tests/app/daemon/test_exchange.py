"""From a worker's replies to an answer's bytes, without a worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from localllm.app.daemon import exchange
from localllm.app.daemon.answers import ChatAnswer, Head
from localllm.app.daemon.body import ClientGone
from localllm.app.daemon.exchange import unless_gone
from localllm.app.daemon.frames import Finished, Generate, Piece
from localllm.app.daemon.metrics import Metrics
from localllm.app.daemon.stream import Stream
from localllm.app.errors import Stopping, WorkerDied


def tally(*frames: Any, requests: tuple[Generate, ...] = (Generate(id="a"),)) -> exchange._Tally:
    stream = Stream([request.id for request in requests], 1, lambda _: None)
    for frame in frames:
        stream.put(frame)
    return exchange._Tally(list(requests), stream, Metrics().watch("m"))


async def test_choices_of_several_prompts_are_counted_on_and_their_cost_is_added() -> None:
    two = (Generate(id="a", n=2), Generate(id="b", n=2))
    pieces = [Piece(id="a", choice=1, tokens=1), Piece(id="b", choice=1, tokens=1)]
    made = tally(*pieces, requests=two)
    assert await made.take() == [(1, pieces[0]), (3, pieces[1])]
    made._stream.put(Finished(id="a", prompt_tokens=5, completion_tokens=7, cached_tokens=2))
    made._stream.put(Finished(id="b", prompt_tokens=50, completion_tokens=70, cached_tokens=20))
    assert await made.take() == []
    usage = made.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (55, 77, 132)
    assert usage.prompt_tokens_details.cached_tokens == 22


async def test_an_end_alone_is_nothing_to_tell() -> None:
    two = (Generate(id="a"), Generate(id="b"))
    made = tally(Finished(id="a"), requests=two)
    taking = asyncio.create_task(made.take())
    await asyncio.sleep(0)
    assert not taking.done(), "the other one goes on"
    piece = Piece(id="b", text="x")
    made._stream.put(piece)
    assert await taking == [(1, piece)]


async def test_what_the_engine_gave_up_is_an_error() -> None:
    with pytest.raises(Stopping):
        await tally(Finished(id="a", cancelled=True)).take()


async def streamed(made: exchange._Tally) -> tuple[str, list[dict[str, Any]]]:
    """The outcome, and what was sent."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    answer = ChatAnswer(Head("id", "m", "f"), 1, logprobs=False, usage=False)
    return await exchange._stream(answer, made, send), sent


async def test_a_stream_that_ends_well() -> None:
    outcome, (start, *parts) = await streamed(
        tally(Piece(id="a", text="x"), Piece(id="a", finish="stop"), Finished(id="a"))
    )
    assert outcome == "ok"
    assert start["status"] == 200
    assert dict(start["headers"])[b"content-type"].startswith(b"text/event-stream")
    assert dict(start["headers"])[b"cache-control"] == b"no-cache"
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
    assert parts[-1]["body"] == b"data: [DONE]\n\n"
    assert all(part["body"] for part in parts)


async def test_nothing_is_sent_for_a_piece_without_news() -> None:
    made = tally(Piece(id="a", tokens=1))
    streaming = asyncio.create_task(streamed(made))
    await asyncio.sleep(0)
    made._stream.put(Piece(id="a", finish="stop"))
    made._stream.put(Finished(id="a"))
    _, (_, *parts) = await streaming
    assert len(parts) == 3
    assert all(part["body"] for part in parts)


@pytest.mark.parametrize("finish", [None, "stop"])
async def test_a_stream_that_breaks(finish: Any) -> None:
    made = tally(Piece(id="a", text="x", finish=finish))
    made._stream.fail(WorkerDied("gone"))
    outcome, (_, *parts) = await streamed(made)
    assert outcome == "worker_died"
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
    assert b'"gone"' in parts[-1]["body"]
    assert not any(b"[DONE]" in part["body"] for part in parts)


async def test_an_end_without_a_reason_is_an_error_of_the_stream() -> None:
    outcome, (*_, last) = await streamed(tally(Piece(id="a", text="x"), Finished(id="a")))
    assert (outcome, last["more_body"]) == ("internal_error", False)
    assert b"without a reason" in last["body"]


async def test_work_goes_on_while_the_client_is_there() -> None:
    messages: asyncio.Queue[Any] = asyncio.Queue()
    messages.put_nowait({"type": "http.request"})
    done = asyncio.Event()
    ended: list[str] = []

    async def work() -> None:
        try:
            await done.wait()
            ended.append("done")
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    working = asyncio.create_task(unless_gone(messages.get, work()))
    await asyncio.sleep(0.01)
    assert not working.done()
    done.set()
    await working

    done.clear()
    messages.put_nowait({"type": "http.disconnect"})
    with pytest.raises(ClientGone):
        await unless_gone(messages.get, work())
    assert ended == ["done", "cancelled"]
    assert len(asyncio.all_tasks()) == 1

    async def fail() -> None:
        raise WorkerDied("gone")

    with pytest.raises(WorkerDied):
        await unless_gone(messages.get, fail())
