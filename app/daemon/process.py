"""One worker process: started, spoken to over a socket pair, watched, stopped.

What ends it unasked, and what shows it:

    killed, crashed, out of its protocol    the socket closes, or says what no frame is
    the engine failed                       it tells its requests so and exits at once
    its load hangs                          it says nothing of it for longer than the stage may take
    a step hangs (a kernel that never ends) its figures say how long the step has run
    it hangs itself                         it gives no figures
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import logging.handlers
import os
import re
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from ..config import PREFIX
from ..errors import AppError, BodyTooLarge, InvalidRequest, WorkerDied
from . import frames
from .frames import AskStats, Cancel, Detokenize, Generate, Load, Loading, ModelInfo, Stats, Tokenize
from .stream import Stream

COMMAND = (sys.executable, "-P", "-m", "localllm.app.daemon.worker")
STOP_SECONDS = 5.0  # from Shutdown to SIGKILL
GONE_SECONDS = 10.0  # from SIGKILL until it is waited for no longer: a driver may hold a process for a while
WATCH_SECONDS = 5.0  # between two looks at a worker that holds requests
LOAD_SECONDS = 300.0  # for a stage of its load, kernels that are compiled included; one names how much more it may take
ANSWER_SECONDS = 30.0  # within which it gives its figures: its loop computes nothing, so a slow step is no excuse
LOG_BYTES = 2**20  # of a worker's log, twice: the running file and the one before
LOG_READ = 2**16  # bytes at a time; a longer line is broken

log = logging.getLogger(__name__)

Request = Generate | Tokenize | Detokenize | AskStats
Progress = Callable[[str, float], None]  # words for people, 0…1


class Worker:
    """An engine process for one model.

    Once it is over, for whatever reason, every open stream has its error, `state` is "over" and `on_over` was called.
    One that hangs is ended: its load makes no progress, a step has taken longer than `step_timeout` seconds (0: than
    the model's backend allows), or it does not answer.
    """

    def __init__(
        self,
        load: Load,
        *,
        log_dir: Path,
        on_over: Callable[[Worker], None],
        command: Sequence[str] = COMMAND,
        step_timeout: float = 0.0,
    ) -> None:
        self.load_frame = load
        self.state: Literal["loading", "ready", "over"] = "loading"
        self.info: ModelInfo | None = None
        self.listeners: list[Progress] = []
        self.expected_end: AppError | None = None  # set when we end it: what open requests are told
        self.held = 0  # answers it has still to give
        self._streams: dict[str, Stream] = {}  # by frame id
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._idle_since = time.monotonic()
        self._command, self._log_dir, self._on_over = command, log_dir, on_over
        self._step_timeout = step_timeout
        self._stage: Loading | None = None  # of its load, that it told last
        self._told = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None

    @property
    def model(self) -> str:
        return self.load_frame.model

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def idle(self) -> float:
        """Seconds since the last request ended; 0 while it loads or holds any."""
        return 0.0 if self.held or self.state == "loading" else time.monotonic() - self._idle_since

    @property
    def log_name(self) -> str:
        return f"worker-{re.sub(r'[^A-Za-z0-9._-]+', '--', self.model).strip('-')[-100:]}.log"

    async def start(self) -> ModelInfo:
        """Start the process and load the model. Raises the worker's reason when it cannot; the process is gone then."""
        ours, theirs = socket.socketpair()
        with theirs:
            reader, self._writer = await asyncio.open_connection(sock=ours)
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    "--fd",
                    str(theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    env=worker_environment(),
                    process_group=0,  # Ctrl-C at the daemon's terminal is the daemon's to handle
                )
            except OSError as error:
                self._end(WorkerDied(f"cannot start the engine process: {error}"))
                raise WorkerDied(f"cannot start the engine process: {error}") from None
        loaded: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        loaded.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._tasks = [
            asyncio.create_task(self._read(reader, loaded)),
            asyncio.create_task(self._keep_log(self._process)),
        ]
        self._writer.write(frames.pack(self.load_frame))
        watching = asyncio.create_task(self._watch_load(loaded))
        try:
            return await loaded
        except AppError:
            await self.kill()
            raise
        finally:
            watching.cancel()

    def open(self, requests: Sequence[Request], weight: int = 1) -> Stream:
        """Send frames; their replies come through the stream. Raises an AppError when they cannot be sent."""
        if self.state != "ready" or self._writer is None:
            raise self.end_error
        try:
            packed = b"".join(frames.pack(request) for request in requests)
        except (OverflowError, RecursionError, UnicodeEncodeError) as error:
            raise InvalidRequest(f"the request has a value that cannot be sent to the worker: {error}") from None
        except ValueError as error:
            raise BodyTooLarge(str(error)) from None
        stream = Stream([request.id for request in requests], weight, self._close)
        self._streams |= dict.fromkeys(stream.ids, stream)
        self.held += weight
        if weight:
            self._quiet.clear()
        self._writer.write(packed)
        return stream

    async def stats(self, seconds: float) -> Stats | None:
        """What it says of itself; None when it is not ready, or does not say so within so many seconds."""
        if self.state != "ready":
            return None
        try:
            async with asyncio.timeout(seconds), self.open([AskStats(id=uuid.uuid4().hex)], weight=0) as stream:
                return next((reply for reply in await stream.take() if isinstance(reply, Stats)), None)
        except (TimeoutError, AppError):
            return None

    async def quiet(self, seconds: float) -> None:
        """Returns when it holds no request, or after so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._quiet.wait()
        except TimeoutError:
            log.info("%s still has %d requests after %.1f s", self.model, self.held, seconds)

    async def stop(self, error: AppError) -> None:
        """End it in good order; requests still open get `error`."""
        self.expected_end = self.expected_end or error
        for stream in set(self._streams.values()):
            stream.fail(self.expected_end)
        if self._writer is not None and self.state == "ready":
            self._writer.write(frames.pack(frames.Shutdown()))
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self._over.wait()
            except TimeoutError:
                log.warning("worker of %s did not stop within %.0f s: killing it", self.model, STOP_SECONDS)
        await self.kill()

    async def kill(self) -> None:
        """End it at once; returns when the process is gone, or after GONE_SECONDS."""
        if self._process is not None:
            self._kill_group(self._process.pid)
            await self.gone()
        self._end(self.end_error)
        for task in self._tasks:
            if task is not asyncio.current_task():
                await asyncio.wait([task], timeout=STOP_SECONDS)

    async def gone(self) -> None:
        """Returns when its process is no more, and so what it held of the device is free; or after GONE_SECONDS."""
        if self._process is not None:
            try:
                async with asyncio.timeout(GONE_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                log.warning("worker of %s (pid %d) has ended, but its process remains", self.model, self.pid)

    async def _watch_load(self, loaded: asyncio.Future[ModelInfo]) -> None:
        """End it when its load hangs. The second look is for a daemon that was itself stopped for a while."""
        while True:
            self._told.clear()
            stage, more = (self._stage.stage, self._stage.more) if self._stage else ("starting", 0.0)
            limit = LOAD_SECONDS + more
            if await self._tells_within(limit) or await self._tells_within(WATCH_SECONDS):
                continue
            hung = f"{stage} took more than {limit:g} s"
            log.error("worker of %s (pid %d) hangs: %s", self.model, self.pid, hung)
            error = WorkerDied(f"the engine process of {self.model} hung: {hung}", hint=self._last_words)
            self._end(error)
            if not loaded.done():
                loaded.set_exception(error)
            return

    async def _tells_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._told.wait()
        except TimeoutError:
            return False

    async def _watch(self, info: ModelInfo) -> None:
        """End it when it hangs. Two looks in a row must say so: the first may follow a stop of the whole machine."""
        limit = self._step_timeout or info.step_seconds
        pause = min(WATCH_SECONDS, limit / 4) if limit else WATCH_SECONDS
        before = ""
        while self.state == "ready":
            await asyncio.sleep(pause)
            hung = await self._look(limit) if self.held else ""
            if hung and before and self.state == "ready":
                log.error("worker of %s (pid %d) hangs: %s", self.model, self.pid, hung)
                self._end(
                    WorkerDied(f"the engine process of {self.model} hung: {hung}; the next request starts a new one")
                )
                await self.kill()
            before = hung

    async def _look(self, limit: float) -> str:
        """How it hangs; empty: it does not."""
        stats = await self.stats(ANSWER_SECONDS)
        if stats is None:
            return f"it did not respond for {ANSWER_SECONDS:.0f} s"
        return f"a step took more than {limit:g} s" if 0 < limit < stats.step_age else ""

    def _close(self, stream: Stream) -> None:
        """The reader of a stream is done: cancel what runs, forget it."""
        if stream.ids[0] not in self._streams:
            return  # closed before, or the worker is over
        for name in stream.ids:
            del self._streams[name]
            if name in stream.running and self._writer is not None:
                self._writer.write(frames.pack(Cancel(id=name)))
        self.held -= stream.weight
        if stream.weight and not self.held:
            self._idle_since = time.monotonic()
            self._quiet.set()

    async def _read(self, reader: asyncio.StreamReader, loaded: asyncio.Future[ModelInfo]) -> None:
        """Hand out frames until the worker is gone."""
        reason: AppError | None = None
        try:
            while True:
                frame = await frames.read_from_worker(reader)
                match frame:
                    case Loading():
                        self._stage = frame
                        self._told.set()
                        for listener in self.listeners:
                            listener(frame.stage, frame.done)
                    case frames.Loaded() if loaded.done():  # it was ended meanwhile, or given up
                        break
                    case frames.Loaded():
                        self.state, self.info = "ready", frame.info
                        self._idle_since = time.monotonic()
                        loaded.set_result(frame.info)
                        self._watching = asyncio.create_task(self._watch(frame.info))
                    case frames.LoadFailed():
                        reason = self.expected_end = frame.fault.error()
                        break
                    case frames.Failed() if frame.fault.code == WorkerDied.code:
                        # It leaves, and must get no more requests in the time that takes.
                        reason = self.expected_end or WorkerDied(frame.fault.message, hint=self._last_words)
                        break
                    case _:
                        stream = self._streams.get(frame.id)
                        if stream is not None:
                            stream.put(frame)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except (msgspec.DecodeError, ValueError) as broken:
            log.error("worker of %s broke the protocol: %s", self.model, broken)
        # Tell its requests first: a process that was killed hard can take a while to be reaped.
        error = reason or self.end_error
        self._end(error)
        if not loaded.done():
            loaded.set_exception(error)
        await self._reap()

    async def _reap(self) -> None:
        """Wait for the process to be gone, and leave none of its children behind."""
        assert self._process is not None
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            log.warning("worker of %s closed its connection but still runs: killing it", self.model)
        self._kill_group(self._process.pid)
        code = await self._process.wait()
        if self.expected_end is None:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            log.error("worker of %s (pid %d) ended: %s", self.model, self._process.pid, how)

    @staticmethod
    def _kill_group(pid: int) -> None:
        """A worker leads a process group of its own: its helpers go with it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all gone (macOS: PermissionError of a zombie)
            os.killpg(pid, signal.SIGKILL)

    @property
    def end_error(self) -> AppError:
        """Why it is over, or would be if it ended now."""
        return self.expected_end or WorkerDied(
            f"the engine process of {self.model} ended unexpectedly; the next request starts a new one",
            hint=self._last_words,
        )

    @property
    def _last_words(self) -> str:
        return f"see {self.log_name} in the log folder"

    def _end(self, error: AppError) -> None:
        """It is over: tell every open request, and the host. Only the first call does anything."""
        if self.state == "over":
            return
        self.state = "over"
        streams, self._streams = set(self._streams.values()), {}
        for stream in streams:
            stream.fail(error)
        if self._writer is not None:
            self._writer.close()
        self.held = 0
        self._quiet.set()
        self._over.set()
        if self._watching is not None and self._watching is not asyncio.current_task():
            self._watching.cancel()
        self._on_over(self)

    async def _keep_log(self, process: asyncio.subprocess.Process) -> None:
        """Copy what the process prints to a log of bounded size."""
        assert process.stdout is not None
        sink: logging.Handler
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            sink = logging.handlers.RotatingFileHandler(
                self._log_dir / self.log_name, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8", errors="replace"
            )
        except OSError as error:
            log.warning("cannot open the log of the worker of %s: %s", self.model, error)
            sink = logging.NullHandler()
        rest = b""  # of a line whose end has not come
        while data := await process.stdout.read(LOG_READ):
            lines, ended, rest = (rest + data).rpartition(b"\n")
            if ended:
                _log_to(sink, lines)
            if len(rest) > LOG_READ:
                _log_to(sink, rest)
                rest = b""
        if rest:
            _log_to(sink, rest)
        sink.close()


def worker_environment() -> dict[str, str]:
    """The daemon's, without the key that it asks of its clients."""
    return {name: value for name, value in os.environ.items() if name != f"{PREFIX}API_KEY"}


def _log_to(sink: logging.Handler, lines: bytes) -> None:
    text = lines.decode("utf-8", "replace")
    sink.emit(logging.LogRecord(__name__, logging.INFO, "", 0, "%s", (text,), None))
