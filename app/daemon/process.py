"""Starts, watches and stops one worker process, and exchanges frames with it over a socket pair.

Unexpected ends, and how the daemon detects them:

    killed, crashed, protocol broken         the socket closes, or has bytes that are no frame
    engine failed                            Failed frames with the code of WorkerDied; the worker exits
    load hangs                               no Loading frame within the limit of the stage
    step hangs (a kernel that never ends)    the statistics have a step_age above the limit
    event loop of the worker hangs           no reply with statistics
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from .. import children, frames
from ..api.models import Progress, Request
from ..api.stream import Stream
from ..errors import AppError, BodyTooLarge, InvalidRequest, WorkerDied
from ..frames import AskStats, Cancel, FromWorker, Load, Loading, ModelInfo, OfRequest, Stats
from .worker_log import copy_output, log_name

COMMAND = (sys.executable, "-P", "-m", "localllm.app.worker")
STOP_SECONDS = 5.0  # time from the frame Shutdown to SIGKILL
GONE_SECONDS = 10.0  # maximum wait for the end of the process after SIGKILL: a driver may delay it
REASON_SECONDS = 1.0  # maximum wait for the last output of a worker that has ended
WATCH_SECONDS = 5.0  # time between two checks of a worker that has requests
LOAD_SECONDS = 300.0  # limit of one stage of a load, including compilation; `Loading.more` extends the limit
ANSWER_SECONDS = 30.0  # maximum wait for the statistics of a worker; a slow step does not delay them

log = logging.getLogger(__name__)


class WorkerProcess:
    """A worker process for one model.

    After the end of the worker, expected or not, every open stream has an error, `state` is "over", and `on_over` was
    called once. A worker that hangs is killed: if its load makes no progress, a step takes more than `step_timeout`
    seconds (0: the limit of the backend), or the worker does not respond.
    """

    def __init__(
        self,
        load: Load,
        *,
        log_dir: Path,
        on_over: Callable[[WorkerProcess], None],
        command: Sequence[str] = COMMAND,
        step_timeout: float = 0.0,
    ) -> None:
        self.load_frame = load
        self.state: Literal["loading", "ready", "over"] = "loading"
        self.info: ModelInfo | None = None
        self.listeners: list[Progress] = []
        self.expected_end: AppError | None = None  # the error for open requests, set when the daemon ends the worker
        self.unfinished = 0  # number of unfinished answers
        self._streams: dict[str, Stream] = {}  # frame id → stream of its replies
        self._idle_event = asyncio.Event()
        self._idle_event.set()
        self._idle_since = time.monotonic()
        self._command = command
        self._log_dir = log_dir
        self._on_over = on_over
        self._step_timeout = step_timeout
        self._stage: Loading | None = None  # the last Loading frame
        self._progressed = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._ended = asyncio.Event()
        self._tasks: list[asyncio.Task[Any]] = []
        self._output: asyncio.Task[str] | None = None  # copies the output; its result is the reason of a crash
        self._reason = ""
        self._watching: asyncio.Task[None] | None = None

    @property
    def model(self) -> str:
        return self.load_frame.model

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def idle(self) -> float:
        """Seconds since the last request ended; 0 while the worker loads or has requests."""
        return 0.0 if self.unfinished or self.state == "loading" else time.monotonic() - self._idle_since

    async def start(self) -> ModelInfo:
        """Start the process and load the model. Raises the error of a failed load after the end of the process."""
        try:
            daemon_end, worker_end = socket.socketpair()
            with worker_end:
                reader, self._writer = await asyncio.open_connection(sock=daemon_end)
                self._process = await self._spawn(worker_end.fileno())
        except OSError as error:
            failure = WorkerDied(f"cannot start the engine process: {error}")
            self._end(failure)
            raise failure from None
        output = self._process.stdout
        assert output is not None
        loaded: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        loaded.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._output = asyncio.create_task(copy_output(output, self._log_dir, self.model))
        self._tasks = [asyncio.create_task(self._read(reader, loaded)), self._output]
        self._writer.write(frames.pack(self.load_frame))
        watching = asyncio.create_task(self._watch_load(loaded))
        try:
            return await loaded
        except AppError:
            await self.kill()
            raise
        finally:
            watching.cancel()

    async def _spawn(self, descriptor: int) -> asyncio.subprocess.Process:
        """Start the process, which inherits the socket with this number. Raises OSError."""
        return await asyncio.create_subprocess_exec(
            *self._command,
            "--fd",
            str(descriptor),
            pass_fds=(descriptor,),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=children.environment(),
            process_group=0,  # Ctrl-C in the terminal must reach the daemon only
        )

    def open(self, requests: Sequence[Request], weight: int = 1) -> Stream:
        """Send requests; the stream returns the replies. Raises an AppError if the requests cannot be sent."""
        if self.state != "ready" or self._writer is None or self.info is None:
            raise self.end_error
        try:
            packed = b"".join(frames.pack(request) for request in requests)
        except (OverflowError, RecursionError, UnicodeEncodeError) as error:
            raise InvalidRequest(f"the request has a value that cannot be sent to the worker: {error}") from None
        except ValueError as error:
            raise BodyTooLarge(str(error)) from None
        stream = Stream(self.info, [request.id for request in requests], weight, self._close)
        self._streams |= dict.fromkeys(stream.ids, stream)
        self.unfinished += weight
        if weight:
            self._idle_event.clear()
        self._writer.write(packed)
        return stream

    async def stats(self, seconds: float) -> Stats | None:
        """The statistics of the worker; None if the worker is not ready, or does not reply within `seconds`."""
        if self.state != "ready":
            return None
        try:
            async with asyncio.timeout(seconds), self.open([AskStats(id=uuid.uuid4().hex)], weight=0) as stream:
                return next((reply for reply in await stream.take() if isinstance(reply, Stats)), None)
        except (TimeoutError, AppError):
            return None

    async def wait_idle(self, seconds: float) -> None:
        """Wait until the worker has no requests, at most `seconds`."""
        if not await _within(seconds, self._idle_event.wait()):
            log.info("%s still has %d requests after %.1f s", self.model, self.unfinished, seconds)

    async def stop(self, error: AppError) -> None:
        """Shut the worker down, and kill it after STOP_SECONDS. Open requests get `error`."""
        self.expected_end = self.expected_end or error
        for stream in set(self._streams.values()):
            stream.fail(self.expected_end)
        if self._writer is not None and self.state == "ready":
            self._writer.write(frames.pack(frames.Shutdown()))
            if not await _within(STOP_SECONDS, self._ended.wait()):
                log.warning("worker of %s did not stop within %.0f s: killing it", self.model, STOP_SECONDS)
        await self.kill()

    async def kill(self) -> None:
        """Kill the process; returns after its end, or after GONE_SECONDS."""
        if self._process is not None:
            children.kill_group(self._process.pid)
            await self.wait_gone()
        self._end(self.end_error)
        for task in self._tasks:
            if task is not asyncio.current_task():
                await asyncio.wait([task], timeout=STOP_SECONDS)

    async def wait_gone(self) -> None:
        """Wait until the process has ended, which frees its device memory; at most GONE_SECONDS."""
        if self._process is not None and not await _within(GONE_SECONDS, self._process.wait()):
            log.warning("worker of %s (pid %d) has ended, but its process remains", self.model, self.pid)

    async def _watch_load(self, loaded: asyncio.Future[ModelInfo]) -> None:
        """End the worker if its load hangs.

        Two checks in a row must fail, because a suspend of the machine makes one check fail.
        """
        while True:
            self._progressed.clear()
            stage = self._stage or Loading(stage="starting")
            limit = LOAD_SECONDS + stage.more
            if await _within(limit, self._progressed.wait()) or await _within(WATCH_SECONDS, self._progressed.wait()):
                continue
            problem = f"{stage.stage} took more than {limit:g} s"
            log.error("worker of %s (pid %d) hangs: %s", self.model, self.pid, problem)
            error = WorkerDied(f"the engine process of {self.model} hung: {problem}", hint=self._log_hint)
            self._end(error)
            if not loaded.done():
                loaded.set_exception(error)
            return

    async def _watch(self, info: ModelInfo) -> None:
        """Kill the worker if it hangs.

        Two checks in a row must fail, because a suspend of the machine makes one check fail.
        """
        limit = self._step_timeout or info.step_seconds
        pause = min(WATCH_SECONDS, limit / 4) if limit else WATCH_SECONDS
        previous_problem = ""
        while self.state == "ready":
            await asyncio.sleep(pause)
            problem = await self._find_hang(limit) if self.unfinished else ""
            if problem and previous_problem and self.state == "ready":
                log.error("worker of %s (pid %d) hangs: %s", self.model, self.pid, problem)
                self._end(
                    WorkerDied(f"the engine process of {self.model} hung: {problem}; the next request starts a new one")
                )
                await self.kill()
            previous_problem = problem

    async def _find_hang(self, limit: float) -> str:
        """The reason why the worker counts as hung; empty if it does not hang."""
        stats = await self.stats(ANSWER_SECONDS)
        if stats is None:
            return f"it did not respond for {ANSWER_SECONDS:.0f} s"
        return f"a step took more than {limit:g} s" if 0 < limit < stats.step_age else ""

    def _close(self, stream: Stream) -> None:
        """Remove a stream and cancel its running requests."""
        if stream.ids[0] not in self._streams:
            return  # the stream is closed, or the worker has ended
        for name in stream.ids:
            del self._streams[name]
            if name in stream.running and self._writer is not None:
                self._writer.write(frames.pack(Cancel(id=name)))
        self.unfinished -= stream.weight
        if stream.weight and not self.unfinished:
            self._idle_since = time.monotonic()
            self._idle_event.set()

    async def _read(self, reader: asyncio.StreamReader, loaded: asyncio.Future[ModelInfo]) -> None:
        """Handle the frames of the worker until the worker ends. `loaded` gets the result of the load."""
        error: AppError | None = None
        try:
            source = frames.FromWorkerReader(reader)
            while error is None:
                for frame in await source.read():
                    error = self._handle(frame, loaded)
                    if error is not None:
                        break
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._find_reason()
        except (msgspec.DecodeError, ValueError) as problem:
            log.error("worker of %s broke the protocol: %s", self.model, problem)
        # End the requests now: the process may take seconds to exit.
        error = error or self.end_error
        self._end(error)
        if not loaded.done():
            loaded.set_exception(error)
        await self._reap()

    def _handle(self, frame: FromWorker, loaded: asyncio.Future[ModelInfo]) -> AppError | None:
        """Handle one frame. If it is the last frame, returns the error for the open requests, otherwise None."""
        match frame:
            case frames.Piece():  # most frames
                self._deliver(frame)
            case Loading():
                self._stage = frame
                self._progressed.set()
                for listener in self.listeners:
                    listener(frame.stage, frame.done)
            case frames.Loaded() if loaded.done():  # the load was cancelled, or exceeded its limit
                return self.end_error
            case frames.Loaded():
                self.state = "ready"
                self.info = frame.info
                self._idle_since = time.monotonic()
                loaded.set_result(frame.info)
                self._watching = asyncio.create_task(self._watch(frame.info))
            case frames.LoadFailed():
                self.expected_end = frame.fault.error()
                return self.expected_end
            case frames.Failed() if frame.fault.code == WorkerDied.code:
                # The worker is about to exit and must get no more requests.
                return self.expected_end or WorkerDied(frame.fault.message, hint=self._log_hint)
            case _:
                self._deliver(frame)
        return None

    def _deliver(self, frame: OfRequest) -> None:
        """Pass a frame to the stream of its request, if that still runs."""
        stream = self._streams.get(frame.id)
        if stream is not None:
            stream.put(frame)

    async def _find_reason(self) -> None:
        """Find the reason of a crash in the output of the process, if the output ends soon."""
        if self._output is None or self.expected_end is not None:
            return
        await asyncio.wait([self._output], timeout=REASON_SECONDS)
        if self._output.done():
            self._reason = self._output.result()

    async def _reap(self) -> None:
        """Wait for the end of the process, and kill its child processes."""
        assert self._process is not None
        if not await _within(STOP_SECONDS, self._process.wait()):
            log.warning("worker of %s closed its connection but still runs: killing it", self.model)
        children.kill_group(self._process.pid)
        code = await self._process.wait()
        if self.expected_end is None:
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            log.error("worker of %s (pid %d) ended: %s", self.model, self._process.pid, cause)

    @property
    def end_error(self) -> AppError:
        """The error for open requests if the worker has ended or is about to end."""
        reason = f" ({self._reason})" if self._reason else ""
        return self.expected_end or WorkerDied(
            f"the engine process of {self.model} ended unexpectedly{reason}; the next request starts a new one",
            hint=self._log_hint,
        )

    @property
    def _log_hint(self) -> str:
        return f"see {log_name(self.model)} in the log folder"

    def _end(self, error: AppError) -> None:
        """Mark the worker as ended: fail every open stream and call `on_over`. Only the first call has an effect."""
        if self.state == "over":
            return
        self.state = "over"
        streams = set(self._streams.values())
        self._streams = {}
        for stream in streams:
            stream.fail(error)
        if self._writer is not None:
            self._writer.close()
        self.unfinished = 0
        self._idle_event.set()
        self._ended.set()
        if self._watching is not None and self._watching is not asyncio.current_task():
            self._watching.cancel()
        self._on_over(self)


async def _within(seconds: float, work: Awaitable[object]) -> bool:
    """Wait for work. False if it does not end within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        return False
    return True
