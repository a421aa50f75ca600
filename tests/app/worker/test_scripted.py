"""The worker with a scripted engine: crashes, floods, fixed answers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from localllm.app import frames
from localllm.app.chat.prompt import PromptMaker
from localllm.app.chat.template.renderer import TemplateRenderer
from localllm.app.chat.tokenizer.huggingface import ChatTokenizer
from localllm.app.frames import Failed, Finished, Generate, Piece
from localllm.app.worker import opening, outbox, worker
from localllm.app.worker.worker import Worker
from localllm.engine.errors import RunnerFailed
from localllm.engine.request import Delta, Request
from localllm.engine.runner import CacheGroup, RunnerSpec
from localllm.engine.stats import Stats

from ..samples import model_info
from ..tiny_qwen import VOCAB, write_tokenizer

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SPEC = RunnerSpec(vocab_size=VOCAB, max_tokens=64, max_rows=8, max_context=4096, groups=(CacheGroup(16, 4096),))


class ScriptedEngine:
    """Replaces engine.Engine: a test calls `say`, `finish` or `crash`."""

    def __init__(self, runner: object, on_deltas: Callable[..., None], on_failure: Callable[..., None]) -> None:
        self.on_deltas, self.on_failure = on_deltas, on_failure
        self.submitted: list[Request] = []
        self.cancelled: list[str] = []
        self.refuse: Exception | None = None
        self.closed = False

    def start(self) -> None: ...

    def submit(self, request: Request) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.submitted.append(request)

    def cancel(self, name: str) -> bool:
        self.cancelled.append(name)
        return True

    def stats(self) -> Stats:
        return Stats(running=len(self.submitted))

    def close(self) -> None:
        self.closed = True


class FakeRunner:
    spec = SPEC


@dataclass
class Bench:
    """A worker in this process, its engine, and the other end of its socket."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    tokenizer: ChatTokenizer
    served: asyncio.Task[int]
    engines: list[ScriptedEngine] = field(default_factory=list)

    @property
    def engine(self) -> ScriptedEngine:
        return self.engines[0]

    def send(self, frame: frames.Frame) -> None:
        self.writer.write(frames.pack(frame))

    async def read(self) -> Any:
        return await asyncio.wait_for(frames.read_from_worker(self.reader), 100)

    async def until_end(self, name: str) -> list[Any]:
        found: list[Any] = []
        while not found or not isinstance(found[-1], (Finished, Failed)) or found[-1].id != name:
            found.append(await self.read())
        return found

    async def started(self, **fields: Any) -> str:
        """Send a request and wait until the engine has it."""
        name = f"r{len(self.engine.submitted)}"
        self.send(Generate(**{"id": name, "messages": HI} | fields))
        assert (await self.read()) == frames.Started(id=name, prompt_tokens=len(self.engine.submitted[-1].prompt))
        return name

    async def say(self, request: str, text: str, finish: Any = None, **more: Any) -> None:
        """Add one token per step; the last delta has `finish`."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        deltas = [Delta(request, (token,)) for token in ids[:-1]] + [Delta(request, (ids[-1],), finish=finish, **more)]
        for delta in deltas:
            await asyncio.to_thread(self.engine.on_deltas, [delta])


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path), [2])
    renderer = TemplateRenderer()
    info = model_info(context=SPEC.max_context, vocab=VOCAB)
    model = opening.OpenModel(info, FakeRunner(), tokenizer, renderer, PromptMaker(tokenizer, renderer), {})
    engines: list[ScriptedEngine] = []

    def make_engine(*args: Any, **kwargs: Any) -> ScriptedEngine:
        engines.append(ScriptedEngine(*args, **kwargs))
        return engines[-1]

    monkeypatch.setattr(worker, "open_model", lambda load, progress: model)
    monkeypatch.setattr(worker, "Engine", make_engine)
    monkeypatch.setattr(outbox, "OUTPUT_HIGH", 20_000)
    daemon_end, worker_end = socket.socketpair()
    for end in (daemon_end, worker_end):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    reader, writer = await asyncio.open_connection(sock=daemon_end)
    inside = Worker(*await asyncio.open_connection(sock=worker_end))
    made = Bench(reader, writer, tokenizer, asyncio.create_task(inside.serve()), engines)
    made.send(frames.Load(model="m", path="x"))
    assert isinstance(await made.read(), frames.Loaded)
    yield made
    writer.close()
    code = await asyncio.wait_for(made.served, 100)
    assert made.engine.closed == (code == 0), "closing a broken engine may hang"
    model.close()
    await writer.wait_closed()
    gc.unfreeze()


async def test_loaded_objects_are_frozen_for_garbage_collection(bench: Bench) -> None:
    """A garbage collection during a step must not scan them."""
    assert gc.get_freeze_count() > 10_000


async def test_tool_calls_of_a_scripted_engine(bench: Bench) -> None:
    name = await bench.started(tools=[TOOL])
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    await bench.say(f"{name}/0", f"<think>hm</think>Look: {call}\n{call}<|im_end|>", "stop")
    *pieces, end = await bench.until_end(name)
    assert "".join(piece.text for piece in pieces) == "Look:"
    assert "".join(piece.reasoning for piece in pieces) == "hm"
    parts = [part for piece in pieces for part in piece.tool_calls]
    assert [(part.index, part.name) for part in parts if part.id] == [(0, "f"), (1, "f")]
    for index in (0, 1):
        fragments = [part.arguments for part in parts if part.index == index and part.arguments]
        assert "".join(fragments) == '{"a": "é"}'
        assert len(fragments) > 1
    assert pieces[-1].finish == "tool_calls"
    assert isinstance(end, Finished)
    assert bench.engine.cancelled == []


async def test_answer_that_ends_early_is_cancelled_in_the_engine(bench: Bench) -> None:
    name = await bench.started(n=2, stop=["STOP"])
    await bench.say(f"{name}/0", "one STOP two")
    await bench.say(f"{name}/1", "three", "length", cached=3)
    *pieces, end = await bench.until_end(name)
    assert bench.engine.cancelled == [f"{name}/0"]
    assert "".join(piece.text for piece in pieces if piece.choice == 0) == "one "
    assert {piece.choice: piece.finish for piece in pieces} == {0: "stop", 1: "length"}
    assert end.cached_tokens == 0  # the minimum over the choices: the first choice had no cached tokens
    bench.send(frames.Shutdown())
    assert await bench.served == 0


async def test_failed_request_fails_alone(bench: Bench) -> None:
    name = await bench.started(n=2)
    other = await bench.started()
    await bench.say(f"{name}/0", "ab")
    await bench.say(f"{name}/0", "c", "failed", error="the grammar failed: too complex")
    await bench.say(f"{name}/1", "late")
    failed = (await bench.until_end(name))[-1]
    assert failed.fault.code == "invalid_request"
    assert "too complex" in failed.fault.message
    assert f"{name}/1" in bench.engine.cancelled
    await bench.say(f"{other}/0", "fine", "stop")
    assert isinstance((await bench.until_end(other))[-1], Finished)


async def test_step_out_of_memory_fails_only_its_requests(bench: Bench) -> None:
    name, other = await bench.started(n=2), await bench.started()
    await bench.say(f"{name}/0", "ab")
    lost = Delta(f"{name}/1", (), finish="no_memory", error="the step failed: CUDA out of memory")
    await asyncio.to_thread(bench.engine.on_deltas, [lost])
    failed = (await bench.until_end(name))[-1]
    assert failed.fault.code == "out_of_memory"
    assert "CUDA out of memory" in failed.fault.message
    assert "cache_mib" in failed.fault.hint
    assert f"{name}/0" in bench.engine.cancelled
    await bench.say(f"{other}/0", "fine", "stop")
    assert isinstance((await bench.until_end(other))[-1], Finished)


async def test_unexpected_exception_fails_one_request(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = await bench.started()
    with monkeypatch.context() as patch:
        patch.setattr(ChatTokenizer, "decode", lambda *_, **__: 1 / 0)
        await bench.say(f"{name}/0", "a")
        failed = (await bench.until_end(name))[-1]
    assert failed.fault.code == "internal_error"
    assert "ZeroDivisionError" in caplog.text
    assert "division" not in failed.fault.message
    assert "division by zero" not in caplog.text  # the text of an unexpected error may contain a prompt
    other = await bench.started()
    await bench.say(f"{other}/0", "fine", "stop")
    assert isinstance((await bench.until_end(other))[-1], Finished)


async def test_refused_submission(bench: Bench) -> None:
    bench.engine.refuse = RunnerFailed("gone")
    bench.send(Generate(id="x", messages=HI, n=2))
    (failed,) = await bench.until_end("x")
    assert failed.fault.code == "worker_died"


async def test_failed_engine_ends_the_worker(bench: Bench) -> None:
    names = [await bench.started() for _ in range(3)]
    await asyncio.to_thread(bench.engine.on_failure, RunnerFailed("device lost"))
    failed = [await bench.read() for _ in names]
    assert {(frame.id, frame.fault.code) for frame in failed} == {(name, "worker_died") for name in names}
    assert all("device lost" in frame.fault.message for frame in failed)
    assert await asyncio.wait_for(bench.served, 100) == 1


async def test_last_frames_are_sent_before_the_exit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """After them the process exits without cleanup."""
    flushed, flush = [], outbox.Outbox.flush

    async def recorded(box: outbox.Outbox) -> None:
        flushed.append(not bench.served.done())
        await flush(box)

    monkeypatch.setattr(outbox.Outbox, "flush", recorded)
    await asyncio.to_thread(bench.engine.on_failure, RunnerFailed("device lost"))
    assert await asyncio.wait_for(bench.served, 100) == 1
    assert flushed == [True]


async def test_exit_during_a_load_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Left(Exception):
        pass

    def leave(code: int) -> None:
        raise Left(code)

    loading, goes_on = threading.Event(), threading.Event()

    def load(*_: Any) -> None:
        loading.set()
        goes_on.wait(100)
        raise ValueError

    monkeypatch.setattr(worker, "open_model", load)
    monkeypatch.setattr(worker.os, "_exit", leave)
    daemon_end, worker_end = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=daemon_end)
    reader, far = await asyncio.open_connection(sock=worker_end)
    served = asyncio.create_task(Worker(reader, far).serve())
    writer.write(frames.pack(frames.Load(model="m", path="x")))
    await asyncio.to_thread(loading.wait, 100)
    writer.close()
    with pytest.raises(Left, match="0"):
        await asyncio.wait_for(served, 100)
    goes_on.set()
    far.close()
    for end in (writer, far):
        await end.wait_closed()


async def test_endless_step_does_not_prevent_the_exit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the daemon was killed, no other process kills the worker."""
    monkeypatch.setattr(worker, "CLOSE_SECONDS", 0.1)
    ends = threading.Event()
    monkeypatch.setattr(bench.engine, "close", lambda: ends.wait(1000))
    bench.writer.close()
    try:
        assert await asyncio.wait_for(bench.served, 100) == 1
    finally:
        ends.set()


async def test_engine_waits_for_a_daemon_that_does_not_read(bench: Bench) -> None:
    name = await bench.started(ignore_eos=True)
    (token,) = bench.tokenizer.encode("a", add_special_tokens=False)
    steps, total = 0, 3000

    def flood() -> None:
        nonlocal steps
        for steps in range(1, total + 1):
            finish = "length" if steps == total else None
            bench.engine.on_deltas([Delta(f"{name}/0", (token,), finish=finish)])

    # The stream reader buffers some bytes before it pauses its transport; after that, the socket is full.
    bench.reader._limit = 1024  # type: ignore[attr-defined]
    engine = threading.Thread(target=flood, daemon=True)
    engine.start()
    texts_logged = -1
    while texts_logged != steps or steps <= outbox.STEPS_AHEAD:
        texts_logged = steps
        await asyncio.sleep(0.3)
    assert outbox.STEPS_AHEAD < steps < total
    pieces = await bench.until_end(name)
    await asyncio.to_thread(engine.join, 100)
    assert sum(piece.tokens for piece in pieces if isinstance(piece, Piece)) == total


@pytest.mark.parametrize("sent", [Generate(id="r0", prompt="x"), frames.Load(model="m", path="x")])
async def test_broken_protocol_ends_the_worker(bench: Bench, sent: frames.Frame) -> None:
    """A request id that is in use, and a second Load."""
    await bench.started()
    bench.send(sent)
    assert await asyncio.wait_for(bench.served, 100) == 2
    bench.engine.closed = False  # the worker closed the engine, because the engine did not fail


async def test_exception_outside_a_request_ends_the_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A new worker is better than one that lost a task."""
    monkeypatch.setattr(bench.engine, "stats", lambda: 1 / 0)
    bench.send(frames.AskStats(id="s"))
    assert await asyncio.wait_for(bench.served, 100) == 2
    assert "ZeroDivisionError" in caplog.text
    bench.engine.closed = False


async def test_request_cancelled_during_its_preparation_never_starts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, prepare = threading.Event(), worker.prepare

    def slowly(*fields: Any) -> Any:
        goes_on.wait(100)
        return prepare(*fields)

    monkeypatch.setattr(worker, "prepare", slowly)
    bench.send(Generate(id="a", prompt="x"))
    bench.send(Generate(id="b", prompt="x"))
    bench.send(frames.Cancel(id="a"))
    assert await bench.read() == Finished(id="a", cancelled=True)
    goes_on.set()
    assert (await bench.read()) == frames.Started(id="b", prompt_tokens=1)
    assert [request.id for request in bench.engine.submitted] == ["b/0"]
    bench.send(frames.Cancel(id="b"))
    assert (await bench.read()) == Finished(id="b", prompt_tokens=1, cancelled=True)
    assert bench.engine.cancelled == ["b/0"]
    bench.send(frames.Cancel(id="b"))
    bench.send(frames.AskStats(id="s"))
    assert isinstance(await bench.read(), frames.Stats), "the requests end once"


async def test_engine_failure_fails_requests_in_preparation(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(worker, "prepare", lambda *_: goes_on.wait(100))
    bench.send(Generate(id="a", prompt="x"))
    bench.send(frames.AskStats(id="s"))
    await bench.read()
    await asyncio.to_thread(bench.engine.on_failure, RunnerFailed("device lost"))
    failed = await bench.read()
    assert (failed.id, failed.fault.code) == ("a", "worker_died")
    assert await asyncio.wait_for(bench.served, 100) == 1
    goes_on.set()


@pytest.mark.parametrize("prompt", ["<|im_start|>hi", [5, 6]])
async def test_echo_is_the_first_piece(bench: Bench, prompt: str | list[int]) -> None:
    name = await bench.started(prompt=prompt, echo=True, n=2)
    text = prompt if isinstance(prompt, str) else bench.tokenizer.decode(prompt)
    for choice in (0, 1):
        assert await bench.read() == Piece(id=name, choice=choice, text=text)


@pytest.mark.parametrize("token", [-1, VOCAB])
async def test_detokenize_refuses_an_unknown_token(bench: Bench, token: int) -> None:
    bench.send(frames.Detokenize(id="a", tokens=[5, token]))
    failed = await bench.read()
    assert (failed.fault.code, failed.fault.param) == ("invalid_request", "tokens")
    assert str(token) in failed.fault.message
    bench.send(frames.Detokenize(id="a", tokens=[0, VOCAB - 9]))
    assert isinstance(await bench.read(), frames.Text)


async def test_closing_engine_cancels_its_requests(bench: Bench) -> None:
    name = await bench.started(n=2)
    for choice in (0, 1):
        await asyncio.to_thread(bench.engine.on_deltas, [Delta(f"{name}/{choice}", (), finish="cancelled")])
    (end,) = await bench.until_end(name)
    assert end.cancelled
    assert bench.engine.cancelled == []


async def test_event_loop_responds_while_a_template_hangs(bench: Bench) -> None:
    templates = bench.tokenizer.templates
    templates["default"] = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    bench.send(Generate(id="slow", messages=HI))
    bench.send(frames.AskStats(id="s"))
    assert isinstance(await bench.read(), frames.Stats)
    bench.send(Generate(id="raw", prompt="x"))
    assert (await bench.read()).id == "raw"
    failed = (await bench.until_end("slow"))[-1]
    assert failed.fault.code == "chat_template_failed"


async def test_engine_is_a_fixed_number_of_steps_ahead() -> None:
    """The number also holds after steps whose output is not sent yet."""
    daemon_end, worker_end = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=daemon_end)
    box = outbox.Outbox(writer)
    ahead = 0

    def engine() -> None:
        nonlocal ahead
        for _ in range(outbox.STEPS_AHEAD + 3):
            box.enter()
            ahead += 1

    for _ in range(3):
        box.enter()
        box.leave()
    thread = threading.Thread(target=engine, daemon=True)
    thread.start()
    await asyncio.to_thread(thread.join, 0.2)
    assert (ahead, thread.is_alive()) == (outbox.STEPS_AHEAD, True)
    box.stop_waiting()
    await asyncio.to_thread(thread.join, 20)
    assert not thread.is_alive()
    writer.close()
    await writer.wait_closed()
    worker_end.close()


async def test_flush_waits_for_the_last_byte() -> None:
    daemon_end, worker_end = socket.socketpair()
    daemon_end.setblocking(False)
    _, writer = await asyncio.open_connection(sock=daemon_end)
    with contextlib.suppress(BlockingIOError):
        while True:
            daemon_end.send(bytes(4096))
    with contextlib.suppress(BlockingIOError):
        while True:
            daemon_end.send(b"x")
    box = outbox.Outbox(writer)
    writer.write(b"!")  # not sent, because the socket is full
    flushed = asyncio.create_task(box.flush())
    await asyncio.sleep(0.05)
    assert not flushed.done()
    worker_end.settimeout(100)
    received = b""
    while not received.endswith(b"!"):
        received = await asyncio.to_thread(worker_end.recv, 2**20)
    await flushed
    assert writer.transport.get_write_buffer_size() == 0
    writer.close()
    await writer.wait_closed()
    worker_end.close()
