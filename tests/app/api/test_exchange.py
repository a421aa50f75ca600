"""From the replies of a worker to the bytes of a response, without a worker."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from msgspec import structs

from localllm.app.api import exchange, keep_alive
from localllm.app.api.admin import LoadFlags
from localllm.app.api.answers import ChatAnswer, Head
from localllm.app.api.body import ClientGone, is_local
from localllm.app.api.exchange import unless_gone
from localllm.app.api.metrics import Metrics
from localllm.app.api.openai import ChatBody, CompletionBody
from localllm.app.api.stream import Stream
from localllm.app.api.structure import MAX_CONTAINERS, MAX_VALUES, check_structure
from localllm.app.config import Settings
from localllm.app.developer import Developer
from localllm.app.errors import AppError, Forbidden, Overloaded, Stopping, WorkerDied
from localllm.app.frames import Failed, Fault, Finished, Generate, Piece, Started

from ..samples import model_info

PROTOCOLS = {protocol.body: protocol for protocol in (exchange.CHAT, exchange.COMPLETION)}


def check_admin(scope: Any) -> None:
    """The check of the routes, for a daemon without an API key."""
    if not is_local(scope):
        raise Forbidden("no")


def tally(*frames: Any, requests: tuple[Generate, ...] = (Generate(id="a"),)) -> exchange._Tally:
    stream = Stream(model_info(), [request.id for request in requests], 1, lambda _: None)
    for frame in frames:
        stream.put(frame)
    return exchange._Tally(list(requests), stream, Metrics().watch("m"))


async def test_choices_of_several_prompts_are_numbered_and_their_tokens_added() -> None:
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


async def test_finished_frame_alone_gives_no_pieces() -> None:
    two = (Generate(id="a"), Generate(id="b"))
    made = tally(Finished(id="a"), requests=two)
    taking = asyncio.create_task(made.take())
    await asyncio.sleep(0)
    assert not taking.done(), "the other request continues"
    piece = Piece(id="b", text="x")
    made._stream.put(piece)
    assert await taking == [(1, piece)]


async def test_request_cancelled_by_the_engine_is_an_error() -> None:
    with pytest.raises(Stopping):
        await tally(Finished(id="a", cancelled=True)).take()


async def streamed(made: exchange._Tally) -> tuple[str, list[dict[str, Any]]]:
    """The outcome of a stream, and the messages that were sent."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    answer = ChatAnswer(Head("id", "m", "f"), 1, logprobs=False, usage=False)
    return await exchange._stream(answer, made, send, lambda error: error), sent


async def test_complete_stream() -> None:
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


async def test_empty_piece_sends_nothing() -> None:
    made = tally(Piece(id="a", tokens=1))
    streaming = asyncio.create_task(streamed(made))
    await asyncio.sleep(0)
    made._stream.put(Piece(id="a", finish="stop"))
    made._stream.put(Finished(id="a"))
    _, (_, *parts) = await streaming
    assert len(parts) == 3
    assert all(part["body"] for part in parts)


@pytest.mark.parametrize("finish", [None, "stop"])
async def test_error_ends_a_stream(finish: Any) -> None:
    made = tally(Piece(id="a", text="x", finish=finish))
    made._stream.fail(WorkerDied("gone"))
    outcome, (_, *parts) = await streamed(made)
    assert outcome == "worker_died"
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
    assert b'"gone"' in parts[-1]["body"]
    assert not any(b"[DONE]" in part["body"] for part in parts)


async def test_stream_without_a_finish_reason_is_an_error() -> None:
    outcome, (*_, last) = await streamed(tally(Piece(id="a", text="x"), Finished(id="a")))
    assert (outcome, last["more_body"]) == ("internal_error", False)
    assert b"without a finish reason" in last["body"]


async def test_disconnect_cancels_the_work() -> None:
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


class FakeModels:
    """One model that replies with the frames of a test, or refuses with its error."""

    def __init__(self, *replies: Any, refusal: AppError | None = None, strict: bool = False) -> None:
        self.settings = Settings(developer=Developer(max_body_mib=1), strict_fields=strict)
        self.replies = replies
        self.refusal = refusal
        self.calls: list[Any] = []
        self.closed: list[Stream] = []
        self.opened = asyncio.Event()

    def find(self, name: str) -> Any:
        return name if name == "m" else None

    async def open(
        self,
        name: str | None,
        requests: list[Generate],
        *,
        weight: int,
        local: bool,
        flags: LoadFlags | None,
        lifetime: float | None,
    ) -> Stream:
        self.calls.append((name, local, requests, weight))
        self.flags = flags
        self.lifetime = lifetime
        if self.refusal is not None:
            raise self.refusal
        self.opened.set()
        info = model_info(model=name or "only", vocab=10, backend="b", quant="int8")
        stream = Stream(info, [request.id for request in requests], weight, self.closed.append)
        for request in requests:
            for reply in self.replies:
                stream.put(structs.replace(reply, id=request.id))
        return stream


async def exchanged(
    models: FakeModels, kind: Any = ChatBody, *, local: bool = False, raw: bytes = b"", **body: Any
) -> tuple[list[Any], str]:
    """The messages that were sent, and the text of /metrics."""
    sent: list[Any] = []
    metrics = Metrics()
    parts = [{"type": "http.request", "body": raw or json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        if parts:
            return parts.pop()
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "headers": [(b"content-type", b"application/json")],
        "server": ("/socket", None) if local else ("127.0.0.1", 1),
    }
    endpoint = exchange.Exchange(models, metrics, PROTOCOLS[kind], "1.2", check_admin)  # type: ignore[arg-type]
    try:
        await endpoint(scope, receive, send)
    except AppError as error:
        sent.append(error)
    return sent, metrics.render({}, {}).decode()


HI = [{"role": "user", "content": "hi"}]
ENDS = (Started(id="", prompt_tokens=2), Piece(id="", text="x", finish="stop"), Finished(id="", prompt_tokens=2))


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_from_body_to_response(stream: bool) -> None:
    models = FakeModels(*ENDS)
    sent, page = await exchanged(models, messages=HI, stream=stream, model="m")
    ((name, local, requests, weight),) = models.calls
    assert (name, local, weight, len(requests)) == ("m", False, 1, 1)
    body = sent[1]["body"].removeprefix(b"data: ")
    answer = json.loads(body)
    assert (answer["model"], answer["system_fingerprint"]) == ("m", "localllm-1.2-b-float32-int8")
    assert answer["id"] == requests[0].id
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == ("chat.completion.chunk" if stream else "chat.completion")
    assert len(models.closed) == 1
    assert 'localllm_requests_total{model="m",status="ok"} 1.0' in page
    if not stream:
        assert dict(sent[0]["headers"])[b"content-type"] == b"application/json"
        assert answer["choices"][0]["message"]["content"] == "x"


async def test_weight_counts_prompts_times_choices() -> None:
    models = FakeModels(
        *ENDS[:1], Piece(id="", text="x", finish="stop"), Piece(id="", choice=1, finish="stop"), ENDS[2]
    )
    sent, _ = await exchanged(models, CompletionBody, local=True, prompt=["a", "b"], n=2)
    ((name, local, requests, weight),) = models.calls
    assert (name, local, weight, len(requests)) == (None, True, 4, 2)
    answer = json.loads(sent[1]["body"])
    assert answer["id"].startswith("cmpl-")
    assert [request.id for request in requests] == [f"{answer['id']}-0", f"{answer['id']}-1"]
    assert [choice["text"] for choice in answer["choices"]] == ["x", "", "x", ""]


@pytest.mark.parametrize("stream", [False, True])
async def test_ignored_fields_are_in_a_header_or_refused(stream: bool) -> None:
    replies = (Started(id="", prompt_tokens=2, ignored=("reasoning", "thinking")), *ENDS[1:])
    body = {"messages": HI, "stream": stream, "user": "u", "reasoning_effort": "low"}
    (start, *_), _ = await exchanged(FakeModels(*replies), **body)
    named = dict(start["headers"])[b"x-localllm-ignored"]
    assert named == b"user, reasoning_effort, chat_template_kwargs.thinking"
    (start, *_), _ = await exchanged(FakeModels(*ENDS), messages=HI, stream=stream)
    assert b"x-localllm-ignored" not in dict(start["headers"])
    (error,), _ = await exchanged(FakeModels(*replies, strict=True), **body)
    assert (error.code, error.param) == ("unsupported_parameter", "user")
    models = FakeModels(*replies, strict=True)
    (error,), _ = await exchanged(models, **body | {"user": None})
    assert (error.code, error.param, len(models.closed)) == ("unsupported_parameter", "reasoning_effort", 1)


async def test_lifetime_reaches_the_model() -> None:
    for fields, lifetime in (({}, None), ({"keep_alive": "5m"}, 300.0), ({"ttl": 7}, 7.0)):
        models = FakeModels(*ENDS)
        await exchanged(models, messages=HI, **fields)
        assert models.lifetime == lifetime
    (error,), _ = await exchanged(FakeModels(*ENDS), messages=HI, keep_alive="soon")
    assert (error.status, error.param) == (400, "keep_alive")


async def test_load_options_reach_the_model_from_local_clients_only() -> None:
    for load, flags in (({"quant": "int8"}, LoadFlags(quant="int8")), ({}, LoadFlags()), (None, None)):
        models = FakeModels(*ENDS)
        await exchanged(models, local=True, messages=HI, model="m", load=load)
        assert models.flags == flags
    models = FakeModels(*ENDS)
    (error,), _ = await exchanged(models, messages=HI, model="m", load={})
    assert (error.code, models.calls) == ("forbidden", [])
    (error,), _ = await exchanged(models, messages=HI, model="m", load={"quant": "int3"})
    assert error.param == "load.quant"


async def test_metrics_count_outcomes() -> None:
    failing = Failed(id="", fault=Fault(code="context_length_exceeded", message="too long"))
    for stream in (False, True):
        (error,), page = await exchanged(FakeModels(failing), messages=HI, model="m", stream=stream)
        assert error.code == "context_length_exceeded", "an error before the start is a response with a status"
        assert 'localllm_requests_total{model="m",status="context_length_exceeded"} 1.0' in page
    refused = FakeModels(refusal=Overloaded("too many"))
    (error,), page = await exchanged(refused, messages=HI, model="m")
    assert error.code == "server_overloaded"
    assert 'localllm_requests_total{model="m",status="server_overloaded"} 1.0' in page
    (error,), page = await exchanged(refused, messages=HI, model="no-model")
    assert "localllm_requests_total{" not in page, "the label of a metric is never the text of a client"
    (error,), _ = await exchanged(refused, messages=HI, model="m" * 2**20)
    assert error.code == "request_too_large"


async def test_disconnect_counts_as_cancelled() -> None:
    models = FakeModels(ENDS[0])
    metrics = Metrics()
    endpoint = exchange.Exchange(models, metrics, exchange.CHAT, "1.2", check_admin)  # type: ignore[arg-type]
    body = json.dumps({"messages": HI, "model": "m"}).encode()
    messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": body, "more_body": False}]
    read = asyncio.Event()

    async def receive() -> Any:
        if len(messages) == 1:
            await models.opened.wait()
        return messages.pop()

    scope = {"headers": [(b"content-type", b"application/json")], "server": ("127.0.0.1", 1)}
    with pytest.raises(ClientGone):
        await endpoint(scope, receive, lambda _: read.wait())  # type: ignore[arg-type]
    assert len(models.closed) == 1
    assert 'localllm_requests_total{model="m",status="cancelled"} 1.0' in metrics.render({}, {}).decode()


def test_interval_of_keep_alives() -> None:
    assert keep_alive.SECONDS == 15


USER = b'{"role":"user","content":""}'
PART = b'{"type":"text","text":""}'
MANY: dict[str, tuple[type, bytes]] = {
    "messages": (ChatBody, b'{"messages":[%s]}' % b",".join([USER] * 16_384)),
    "more messages": (ChatBody, b'{"messages":[%s]}' % b",".join([USER] * 480_000)),
    "parts": (ChatBody, b'{"messages":[{"role":"user","content":[%s]}]}' % b",".join([PART] * 500_000)),
    "lists": (CompletionBody, b'{"prompt":[%s]}' % b",".join([b"[1]"] * 3_000_000)),
    "tokens": (CompletionBody, b'{"prompt":[%s]}' % b",".join([b"12"] * 1_000_000)),
    "texts": (CompletionBody, b'{"prompt":[%s]}' % b",".join([b'"ab"'] * 3_000_000)),
    "members": (ChatBody, b'{"metadata":{%s}}' % b",".join(b'"%d":""' % number for number in range(1_000_000))),
    "values of a schema": (ChatBody, b'{"guided_json":{"enum":[%s]}}' % b",".join([b"{}"] * 3_000_000)),
    "adapters": (ChatBody, b'{"lora":[%s]}' % b",".join([b'{"name":"a"}'] * 1_000_000)),
    "text": (CompletionBody, b'{"prompt":"%s"}' % (b"[{" * 7_000_000)),
}  # fmt: skip


@pytest.mark.parametrize("name", MANY)
async def test_large_body_does_not_stop_the_event_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread decodes it, in steps. The decoder itself, which holds the interpreter lock, gets few values."""
    kind, body = MANY[name]
    loop_thread = threading.get_ident()
    threads: list[int] = []
    values: list[int] = []

    def check(raw: bytes) -> None:
        threads.append(threading.get_ident())
        check_structure(raw)
        containers = sum(map(raw.count, (b"[", b"{", b":")))
        values.append(0 if name == "text" else containers + raw.count(b","))

    monkeypatch.setattr("localllm.app.api.body.check_structure", check)
    models = FakeModels(*ENDS)
    models.settings = Settings()
    await exchanged(models, kind, raw=body)
    assert len(threads) == 1
    assert threads[0] != loop_thread
    assert sum(values) <= MAX_CONTAINERS + MAX_VALUES
