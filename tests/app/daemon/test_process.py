"""The WorkerProcess, mostly without a process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from msgspec import structs

from localllm.app import children, frames
from localllm.app.daemon import process
from localllm.app.daemon.process import WorkerProcess
from localllm.app.daemon.worker_log import log_name
from localllm.app.errors import AppError, BodyTooLarge, InvalidRequest, ModelUnusable, Stopping, WorkerDied
from localllm.app.frames import AskStats, Cancel, Fault, Finished, Generate, Load, Loading, ModelInfo, Stats

from ..samples import model_info

INFO = model_info()


@dataclass
class Bench:
    """A WorkerProcess that is ready, the other end of its socket, and its calls of `on_over`."""

    worker: WorkerProcess
    reader: asyncio.StreamReader
    over: list[WorkerProcess]

    async def sent(self) -> frames.ToWorker:
        return await asyncio.wait_for(frames.read_to_worker(self.reader), 100)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    daemon_end, worker_end = socket.socketpair()
    over: list[WorkerProcess] = []
    worker = WorkerProcess(Load(model="some/model", path="/"), log_dir=tmp_path, on_over=over.append)
    _, worker._writer = await asyncio.open_connection(sock=daemon_end)
    reader, far = await asyncio.open_connection(sock=worker_end)
    worker.state = "ready"
    worker.info = model_info()
    yield Bench(worker, reader, over)
    for writer in (worker._writer, far):
        writer.close()
        await writer.wait_closed()


async def test_closing_a_stream_cancels_running_requests(bench: Bench) -> None:
    worker = bench.worker
    async with worker.open([Generate(id="a"), Generate(id="b")], weight=2) as stream:
        assert [frame.id for frame in (await bench.sent(), await bench.sent()) if isinstance(frame, Generate)] == [
            "a",
            "b",
        ]
        assert (worker.unfinished, worker.idle) == (2, 0.0)
        stream.put(Finished(id="a"))
    assert await bench.sent() == Cancel(id="b")
    assert (worker.unfinished, worker._streams) == (0, {})
    worker._close(stream)
    assert worker.unfinished == 0, "closed once"


async def test_statistics_do_not_count_as_a_request(bench: Bench) -> None:
    """Otherwise a request of /metrics every second would keep a model loaded for ever."""
    worker = bench.worker
    worker._idle_since -= 100
    async with worker.open([AskStats(id="a")], weight=0):
        assert worker._idle_event.is_set()
        assert worker.unfinished == 0
    assert worker.idle >= 100
    async with worker.open([Generate(id="b")]):
        assert (worker.unfinished, worker._idle_event.is_set()) == (1, False)
    assert worker._idle_event.is_set()
    assert worker.idle < 50


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (Generate(id="a", seed=2**70), InvalidRequest),
        (Generate(id="a", prompt="\ud800"), InvalidRequest),
        (Generate(id="a", prompt="x" * 100), BodyTooLarge),
    ],
)
async def test_request_that_cannot_be_sent_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, frame: Generate, error: type[Exception]
) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME", 100)
    with pytest.raises(error):
        bench.worker.open([Generate(id="b"), frame])
    assert (bench.worker.unfinished, bench.worker._streams) == (0, {})


async def test_end_fails_all_streams_once(bench: Bench) -> None:
    worker = bench.worker
    streams = [worker.open([Generate(id=name)]) for name in "ab"]
    worker._end(WorkerDied("first"))
    worker._end(WorkerDied("second"))
    assert bench.over == [worker]
    assert (worker.state, worker.unfinished, worker._idle_event.is_set(), worker._ended.is_set()) == (
        "over",
        0,
        True,
        True,
    )
    for stream in streams:
        with pytest.raises(WorkerDied, match="first"):
            await stream.take()
        worker._close(stream)
    assert worker.unfinished == 0
    assert await worker.stats(10) is None
    worker.expected_end = Stopping("it was unloaded")
    with pytest.raises(Stopping):
        worker.open([Generate(id="c")])


async def test_process_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    over: list[WorkerProcess] = []
    worker = WorkerProcess(
        Load(model="m", path="/"), log_dir=tmp_path, on_over=over.append, command=[str(tmp_path / "none")]
    )
    with pytest.raises(WorkerDied, match="cannot start the engine process"):
        await worker.start()
    assert (worker.state, over) == ("over", [worker])


async def test_worker_without_a_socket_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the model would stay in the state loading for ever."""

    def refuse() -> None:
        raise OSError(24, "Too many open files")

    over: list[WorkerProcess] = []
    worker = WorkerProcess(Load(model="m", path="/"), log_dir=tmp_path, on_over=over.append)
    monkeypatch.setattr(process.socket, "socketpair", refuse)
    with pytest.raises(WorkerDied, match="Too many open files"):
        await worker.start()
    assert (worker.state, over) == ("over", [worker])


@pytest.mark.parametrize(
    ("limit", "stats", "says"),
    [
        (2.0, 3.0, "a step took more than 2 s"),
        (2.0, 2.0, ""),
        (0.0, 3.0, ""),
        (2.0, None, "it did not respond for 30 s"),
    ],
)
async def test_reasons_for_a_hang(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, limit: float, stats: float | None, says: str
) -> None:
    async def listener_calls(_: float) -> Stats | None:
        one = Stats(id="a", running=1, waiting=0, cache_tokens=1, cache_used=1)
        return None if stats is None else structs.replace(one, step_age=stats)

    monkeypatch.setattr(bench.worker, "stats", listener_calls)
    assert await bench.worker._find_hang(limit) == says


@pytest.mark.parametrize(
    ("checks", "unfinished_answers", "over"),
    [("hx" * 4, 1, False), ("xhh", 1, True), ("hhh", 0, False)],
    ids=["by turns", "two", "idle"],
)
async def test_worker_is_killed_after_two_failed_checks(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, checks: str, unfinished_answers: int, over: bool
) -> None:
    monkeypatch.setattr(process, "WATCH_SECONDS", 0.001)
    worker, left = bench.worker, [look == "h" for look in checks]
    worker.unfinished = unfinished_answers

    async def look(_: float) -> str:
        if not left:
            worker.state = "over"
            return ""
        return "it hangs" if left.pop(0) else ""

    monkeypatch.setattr(worker, "_find_hang", look)
    watching = asyncio.create_task(worker._watch(INFO))
    await asyncio.wait([watching], timeout=100 if unfinished_answers else 0.3)  # without answers, no check is made
    watching.cancel()
    assert bool(bench.over) == over


async def test_load_without_progress_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOAD_SECONDS", 0.01)
    monkeypatch.setattr(process, "WATCH_SECONDS", 0.01)
    over: list[WorkerProcess] = []
    worker = WorkerProcess(Load(model="m", path="/"), log_dir=tmp_path, on_over=over.append)
    loaded = asyncio.get_running_loop().create_future()
    await worker._watch_load(loaded)
    assert over == [worker]
    with pytest.raises(WorkerDied, match=r"starting took more than 0\.01 s") as caught:
        await loaded
    assert log_name(worker.model) in caught.value.hint

    patient = WorkerProcess(Load(model="m", path="/"), log_dir=tmp_path, on_over=over.append)
    patient._stage = Loading(stage="reading", more=60.0)
    watching = asyncio.create_task(patient._watch_load(loaded))
    await asyncio.sleep(0.1)
    assert (watching.done(), patient.state) == (False, "loading")
    assert patient.idle == 0.0
    watching.cancel()


@pytest.mark.parametrize(("setting", "backend_limit", "limit"), [(0.0, 7.0, 7.0), (3.0, 7.0, 3.0), (0.0, 0.0, 0.0)])
async def test_step_limit_is_the_setting_or_the_backend_s(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, setting: float, backend_limit: float, limit: float
) -> None:
    """The limit is the setting, otherwise the value of the backend. Four checks fit into the limit."""
    limits: list[float] = []
    paused: list[float] = []
    worker = bench.worker
    worker._step_timeout, worker.unfinished = setting, 1

    async def look(limit: float) -> str:
        limits.append(limit)
        worker.state = "over"
        return ""

    async def pause(seconds: float) -> None:
        paused.append(seconds)

    monkeypatch.setattr(worker, "_find_hang", look)
    monkeypatch.setattr(process.asyncio, "sleep", pause)
    await worker._watch(structs.replace(INFO, step_seconds=backend_limit))
    assert limits == [limit]
    assert paused == [min(5.0, limit / 4 or 5.0)]


def worker_of(folder: Path, model: str, over: list[WorkerProcess]) -> WorkerProcess:
    fake = Path(__file__).parent / "fake_worker.py"
    load = Load(model=f"test/{model}", path=str(folder))
    return WorkerProcess(load, log_dir=folder, on_over=over.append, command=[sys.executable, str(fake)])


async def test_start_use_and_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over: list[WorkerProcess] = []
    worker = worker_of(tmp_path, "slow", over)
    listener_calls: list[float] = []
    worker.listeners.append(lambda _, done: listener_calls.append(done))
    assert (await worker.start()).model == "test/slow"
    assert listener_calls == [0, 0.25, 0.5, 0.75]
    assert (worker.state, worker.info is not None, over) == ("ready", True, [])
    stats = await worker.stats(10)
    assert stats is not None
    assert stats.running == 0
    assert worker.unfinished == 0
    async with worker.open([Generate(id="gone", prompt="slow 100000")]) as left:
        await left.started()
    assert await worker.stats(10) is not None, "a late frame for a closed stream is ignored"
    running = worker.open([Generate(id="a", prompt="slow 100000")])
    await running.started()
    kill, by_itself = worker.kill, []

    async def recorded() -> None:
        by_itself.append(worker._ended.is_set())
        await kill()

    monkeypatch.setattr(worker, "kill", recorded)
    monkeypatch.setattr(process, "STOP_SECONDS", 100.0)
    await worker.stop(Stopping("it was unloaded"))  # the worker obeys Shutdown: nothing kills it
    assert worker._process is not None
    assert worker._process.returncode is not None
    assert (worker.state, over, by_itself) == ("over", [worker], [True])
    running._replies.clear()
    with pytest.raises(Stopping):
        await running.take()
    assert worker._watching is not None
    await asyncio.wait([worker._watching], timeout=100)
    assert worker._watching.cancelled()
    assert len(asyncio.all_tasks()) == 1, "no task runs"


@pytest.mark.parametrize(("model", "error"), [("broken", ModelUnusable), ("dies", WorkerDied)])
async def test_failed_load_leaves_no_process(tmp_path: Path, model: str, error: type[Exception]) -> None:
    over: list[WorkerProcess] = []
    worker = worker_of(tmp_path, model, over)
    with pytest.raises(error):
        await worker.start()
    assert worker._process is not None
    assert worker._process.returncode is not None
    assert (worker.state, over) == ("over", [worker])
    assert await worker.stats(10) is None
    await worker.stop(Stopping("once more"))
    assert over == [worker]


async def test_worker_that_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOP_SECONDS", 0.1)
    over: list[WorkerProcess] = []
    worker = worker_of(tmp_path, "stubborn", over)
    await worker.start()
    running = worker.open([Generate(id="a", prompt="hang")])
    await running.started()
    await worker.wait_idle(0.01)
    assert worker.state == "ready"
    await worker.stop(Stopping("it was unloaded"))
    assert worker._process is not None
    assert worker._process.returncode == -9
    with pytest.raises(Stopping):
        await running.take()
    assert over == [worker]


async def test_child_processes_end_with_the_worker(tmp_path: Path) -> None:
    over: list[WorkerProcess] = []
    worker = worker_of(tmp_path, "echo", over)
    fake = worker._command[1]
    script = (
        "import runpy, subprocess; subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL,"
        " stderr=subprocess.DEVNULL); runpy.run_path({!r}, run_name='__main__')"
    )
    worker._command = [sys.executable, "-c", script.format(fake)]
    await worker.start()
    (helper,) = psutil.Process(worker.pid).children()
    os.kill(worker.pid, signal.SIGKILL)
    await asyncio.wait(worker._tasks, timeout=100)
    assert over == [worker]
    _, alive = await asyncio.to_thread(psutil.wait_procs, [helper], 100)
    assert alive == []
    with pytest.raises(WorkerDied, match="ended unexpectedly"):
        worker.open([Generate(id="a")])


async def test_error_of_a_crash_has_the_reason_of_the_log(tmp_path: Path) -> None:
    worker = worker_of(tmp_path, "echo", [])
    worker._command = [sys.executable, "-c", "print('2026-01-02 03:04:05,678 CRITICAL the device is lost')"]
    with pytest.raises(WorkerDied, match=r"ended unexpectedly \(the device is lost\); the next request"):
        await worker.start()


def test_worker_environment_has_no_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_API_KEY", "secret")
    assert {**children.environment(), "LOCALLLM_API_KEY": "secret"} == dict(os.environ)
    assert "LOCALLLM_API_KEY" not in children.environment()


READ_ENDS = {
    "gone": (b"", "ended unexpectedly"),
    "broken": (b"\0\0\0\1\xff", "ended unexpectedly"),
    "too large": (b"\xff\xff\xff\xff", "ended unexpectedly"),
    "failed": (frames.pack(frames.Failed(id="x", fault=Fault(code="worker_died", message="no device"))), "no device"),
    "refused": (frames.pack(frames.LoadFailed(fault=Fault(code="model_unusable", message="cut short"))), "cut short"),
    "loaded twice": (frames.pack(frames.Loaded(info=INFO)), "ended unexpectedly"),
}


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("name", READ_ENDS)
async def test_last_frames_of_a_worker(bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str, stopped: bool) -> None:
    """The error of open requests: the reason of a stop, else the error of the worker, else its unexpected end."""
    sent, words = READ_ENDS[name]
    worker = bench.worker
    reaped: list[str] = []

    async def reap() -> None:
        reaped.append(worker.state)

    monkeypatch.setattr(worker, "_reap", reap)
    reader = asyncio.StreamReader()
    reader.feed_data(frames.pack(frames.Started(id="a", prompt_tokens=3)))
    reader.feed_data(frames.pack(frames.Piece(id="nobody", text="x")))
    reader.feed_data(frames.pack(frames.Failed(id="b", fault=Fault(code="internal_error", message="b alone"))))
    reader.feed_data(sent)
    reader.feed_eof()
    first, second = worker.open([Generate(id="a")]), worker.open([Generate(id="b")])
    if stopped:
        worker.expected_end = Stopping("it was unloaded")
        words = words if name == "refused" else "it was unloaded"
    loaded: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
    loaded.set_result(INFO)
    await worker._read(reader, loaded)
    assert first.prompt_tokens == 3
    with pytest.raises(AppError, match=words) as listener_calls:
        await first.take()
    assert "worker-some--model.log" in listener_calls.value.hint or stopped or name == "refused"
    with pytest.raises(AppError, match="b alone"):
        await second.take()
    assert (reaped, bench.over, worker.unfinished) == (["over"], [worker], 0)
    assert (worker.expected_end is not None) == (stopped or name == "refused"), "the log has an unexpected end"


async def test_frames_of_a_load(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = bench.worker
    worker.state = "loading"
    listener_calls: list[tuple[str, float]] = []
    worker.listeners += [lambda *words: listener_calls.append(words), lambda *words: listener_calls.append(words)]

    async def reap() -> None: ...

    async def watch(info: ModelInfo) -> None: ...

    monkeypatch.setattr(worker, "_reap", reap)
    monkeypatch.setattr(worker, "_watch", watch)
    reader = asyncio.StreamReader()
    reader.feed_data(frames.pack(Loading(stage="reading", done=0.5, more=7.0)))
    reader.feed_data(frames.pack(frames.Loaded(info=INFO)))
    loaded: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
    reading = asyncio.create_task(worker._read(reader, loaded))
    assert await loaded == INFO
    assert listener_calls == [("reading", 0.5)] * 2
    assert worker._stage == Loading(stage="reading", done=0.5, more=7.0)
    assert worker._progressed.is_set()
    assert (worker.state, worker.info) == ("ready", INFO)
    reader.feed_eof()
    await reading
    reader = asyncio.StreamReader()
    reader.feed_eof()
    loaded = asyncio.get_running_loop().create_future()
    await worker._read(reader, loaded)
    with pytest.raises(WorkerDied, match="ended unexpectedly"):
        loaded.result()
    assert bench.over == [worker], "on_over is called once"


async def test_wait_for_the_process_has_a_limit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may delay the end of a killed process."""
    ended = asyncio.Event()
    process_of_it: Any = SimpleNamespace(pid=0, wait=ended.wait)
    await bench.worker.wait_gone()
    bench.worker._process = process_of_it
    waiting = asyncio.create_task(bench.worker.wait_gone())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    ended.set()
    await waiting
    ended.clear()
    monkeypatch.setattr(process, "GONE_SECONDS", 0.01)
    async with asyncio.timeout(100):
        await bench.worker.wait_gone()
    bench.worker._process = None
