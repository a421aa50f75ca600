"""The worker process of one model: `python -m localllm.app.worker --fd N`.

It exchanges the frames of frames.py over an inherited socket. The event loop reads, writes and converts tokens to text.
Threads render, tokenize and compile. The engine has its own thread and wakes the loop once per step.

    daemon ──frames──► loop ──prepare──► threads ──submit──► engine thread
    daemon ◄──frames── loop ◄──────── deltas, one wake-up per step ────┘

Exit codes: 0 after Shutdown or the end of the daemon; 1 if the load or the engine failed, or the last step did not end;
2 if the daemon broke the protocol. With 1 and 2 the worker exits without cleanup, because closing a broken device may
hang.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import faulthandler
import gc
import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

import msgspec

from ...engine.engine import Engine
from ...engine.errors import RunnerFailed
from ...engine.request import Delta
from .. import frames
from ..chat.sampling import check_token_ids
from ..frames import Detokenize, Fault, Tokenize
from .adapters import find_adapter, load_adapter, unknown_adapter
from .embedding import Embedding, prepare_embedding
from .faults import app_error, internal_error
from .generation import Generation, prepare, prompt_of
from .opening import OpenModel, open_model
from .outbox import Outbox

CLOSE_SECONDS = 10.0  # maximum wait for the current step; a daemon that runs kills the worker earlier

Job = Generation | Embedding
JobFrame = frames.Generate | frames.Embed
Request = TypeVar("Request", Tokenize, Detokenize)

log = logging.getLogger(__name__)


class Worker:
    """Loads one model and serves the requests of the daemon."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._outbox = Outbox(writer)
        self._loop = asyncio.get_running_loop()
        self._preparing: set[str] = set()  # frame ids
        self._running: dict[str, Job] = {}  # frame id → job
        self._by_request: dict[str, Job] = {}  # id of the engine's request → job
        self._tasks: set[asyncio.Task[None]] = set()
        self._exit_code: asyncio.Future[int] = self._loop.create_future()
        self._loading = False
        self._broken = False
        self._model: OpenModel | None = None
        self._engine: Engine | None = None

    async def serve(self) -> int:
        """Serve until the connection ends, close the model, and return the exit code.

        A model whose engine failed stays open, because closing it may hang.
        """
        self._spawn(self._read())
        code = await self._exit_code
        await self._outbox.flush()
        if self._loading:
            os._exit(code)  # a thread may still read weights for minutes
        if self._broken:
            self._outbox.close()
            return code
        self._outbox.stop_waiting()
        if self._engine is not None and not await self._closed(self._engine):
            self._outbox.close()
            return 1
        if self._model is not None:
            self._model.close()
        self._outbox.close()
        return code

    @staticmethod
    async def _closed(engine: Engine) -> bool:
        """Close the engine; False if its current step does not end.

        The worker must exit even then: if the daemon has ended, no other process kills the worker.
        """
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.to_thread(engine.close)
        except TimeoutError:
            log.error("the current step did not end within %.0f s; it is abandoned", CLOSE_SECONDS)
            return False
        return True

    async def _read(self) -> None:
        """Read and handle frames until the daemon closes the connection."""
        try:
            first = await frames.read_to_worker(self._reader)
            if not isinstance(first, frames.Load):
                raise ValueError(f"the first frame must be Load, not {type(first).__name__}")
            self._spawn(self._load(first))
            while True:
                self._handle(await frames.read_to_worker(self._reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._end(0)
        except (msgspec.DecodeError, ValueError) as error:
            log.error("the daemon broke the protocol: %s", type(error).__name__)
            self._end(2)

    def _handle(self, frame: frames.ToWorker) -> None:
        model = self._model
        engine = self._engine
        match frame:
            case frames.Shutdown():
                self._end(0)
            case frames.Cancel():
                self._cancel(frame.id)
            case frames.Load():
                raise ValueError("a worker loads one model")
            case _ if model is None or engine is None:
                raise ValueError(f"{type(frame).__name__} before the model was loaded")
            case frames.LoadAdapter():
                self._spawn(self._load_adapter(frame, model, engine))
            case frames.UnloadAdapter():
                self._outbox.send(self._unload_adapter(frame, engine))
            case _:
                self._handle_request(frame, model, engine)

    def _handle_request(
        self,
        frame: JobFrame | frames.Tokenize | frames.Detokenize | frames.AskStats,
        model: OpenModel,
        engine: Engine,
    ) -> None:
        match frame:
            case frames.Generate() | frames.Embed():
                if frame.id in self._preparing or frame.id in self._running:
                    raise ValueError("a request id is used twice")
                self._preparing.add(frame.id)
                self._spawn(self._start(frame, model, engine))
            case frames.Tokenize():
                self._spawn(self._reply(frame, _tokenize, model))
            case frames.Detokenize():
                self._spawn(self._reply(frame, _detokenize, model))
            case frames.AskStats():
                self._outbox.send(frames.Stats(id=frame.id, **dataclasses.asdict(engine.stats())))

    async def _load(self, load: frames.Load) -> None:
        def progress(stage: str, done: float, more: float) -> None:
            self._loop.call_soon_threadsafe(self._outbox.send, frames.Loading(stage=stage, done=done, more=more))

        self._loading = True
        try:
            model = await asyncio.to_thread(open_model, load, progress)
            engine = Engine(model.runner, on_deltas=self._on_deltas, on_failure=self._on_failure)
            engine.start()
            gc.collect()
            gc.freeze()  # otherwise a garbage collection scans all imported modules and delays a step
        except Exception as error:  # damaged model files may cause any exception
            self._outbox.send(frames.LoadFailed(fault=self._fault(error)))
            self._end(1)
            return
        finally:
            self._loading = False
        self._model = model
        self._engine = engine
        self._outbox.send(frames.Loaded(info=model.info))

    async def _start(self, frame: JobFrame, model: OpenModel, engine: Engine) -> None:
        """Prepare a request in a thread and submit it to the engine."""
        try:
            job = await asyncio.to_thread(_prepare, frame, model)
        except Exception as error:
            if frame.id in self._preparing:
                self._preparing.remove(frame.id)
                self._outbox.send(frames.Failed(id=frame.id, fault=self._fault(error)))
            return
        if frame.id not in self._preparing:  # cancelled during the preparation
            return
        self._preparing.remove(frame.id)
        self._running[frame.id] = job
        try:
            # The registered adapters change only on this event loop, so all choices use the same version.
            adapter = find_adapter(frame.adapter, engine)
            for request in job.requests:
                self._by_request[request.id] = job
                engine.submit(dataclasses.replace(request, adapter=adapter, adapter_scale=frame.adapter_scale))
        except Exception as error:
            self._outbox.send(self._fail(job, error))
            return
        self._outbox.send(
            frames.Started(id=frame.id, prompt_tokens=job.prompt_tokens, warnings=job.warnings, ignored=job.ignored)
        )
        self._outbox.send(*job.opening(model.tokenizer))

    async def _reply(
        self, frame: Request, convert: Callable[[Request, OpenModel], frames.Frame], model: OpenModel
    ) -> None:
        """Convert a frame to its reply in a thread, and send the reply."""
        try:
            self._outbox.send(await asyncio.to_thread(convert, frame, model))
        except Exception as error:
            self._outbox.send(frames.Failed(id=frame.id, fault=self._fault(error)))

    async def _load_adapter(self, frame: frames.LoadAdapter, model: OpenModel, engine: Engine) -> None:
        try:
            self._outbox.send(await load_adapter(frame, model, engine))
        except Exception as error:  # damaged adapter files may cause any exception
            self._outbox.send(frames.Failed(id=frame.id, fault=self._fault(error)))

    @staticmethod
    def _unload_adapter(frame: frames.UnloadAdapter, engine: Engine) -> frames.Frame:
        if engine.unregister_adapter(frame.name):
            return frames.AdapterUnloaded(id=frame.id)
        return frames.Failed(id=frame.id, fault=Fault.of(unknown_adapter(frame.name, engine)))

    def _cancel(self, name: str) -> None:
        if name in self._preparing:
            self._preparing.remove(name)
            self._outbox.send(frames.Finished(id=name, cancelled=True))
        job = self._running.get(name)
        if job is not None:
            self._forget(job)
            self._outbox.send(job.finished(cancelled=True))

    def _on_deltas(self, deltas: Sequence[Delta]) -> None:
        """Pass the deltas of a step to the event loop. Runs on the engine's thread; may wait until the daemon reads."""
        self._outbox.enter()
        self._loop.call_soon_threadsafe(self._take, deltas)

    def _take(self, deltas: Sequence[Delta]) -> None:
        """Send the output of a step."""
        output: list[frames.Frame] = []
        for delta in deltas:
            job = self._by_request.get(delta.request_id)
            if job is not None:  # otherwise the request was cancelled, or has failed
                output += self._convert(delta, job)
        self._outbox.send(*output)
        self._outbox.leave()

    def _convert(self, delta: Delta, job: Job) -> list[frames.Frame]:
        """The frames for the output of one choice."""
        try:
            piece = job.take(delta)
        except Exception as error:
            return [self._fail(job, error)]
        output: list[frames.Frame] = []
        if piece is not None:
            output.append(piece)
        if job.is_done(delta.request_id):
            output += self._finish_choice(delta, job)
        return output

    def _finish_choice(self, delta: Delta, job: Job) -> list[frames.Frame]:
        """Remove a choice after its last delta. Returns Finished after the last choice of the request."""
        del self._by_request[delta.request_id]
        if delta.finish is None and self._engine is not None:
            self._engine.cancel(delta.request_id)
        if not job.has_ended:
            return []
        del self._running[job.frame.id]
        # "cancelled": the engine is closing. Requests that the daemon cancels are no longer in `_by_request`.
        return [job.finished(cancelled=delta.finish == "cancelled")]

    def _on_failure(self, error: RunnerFailed) -> None:
        """Fail all requests after a failure of the engine. Runs on the engine's thread."""
        self._loop.call_soon_threadsafe(self._die, error)

    def _die(self, error: RunnerFailed) -> None:
        self._broken = True
        fault = self._fault(error)
        ids = [*self._running, *self._preparing]
        self._running.clear()
        self._by_request.clear()
        self._preparing.clear()
        self._outbox.send(*(frames.Failed(id=name, fault=fault) for name in ids))
        log.error("the engine failed; %d requests ended: %s", len(ids), error)
        self._end(1)

    def _fail(self, job: Job, error: Exception) -> frames.Failed:
        """End a request with a fault; returns the frame to send."""
        self._forget(job)
        return frames.Failed(id=job.frame.id, fault=self._fault(error))

    def _forget(self, job: Job) -> None:
        """Remove a request and cancel it in the engine; no more frames about this request follow."""
        self._running.pop(job.frame.id, None)
        for request in job.requests:
            if self._by_request.pop(request.id, None) is not None and self._engine is not None:
                self._engine.cancel(request.id)

    def _fault(self, error: Exception) -> Fault:
        """The fault for the daemon. Logs an unexpected error, but not its text, which may contain a prompt."""
        reported = app_error(error)
        if reported is None:
            log.error("%s\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))
            reported = internal_error()
        return Fault.of(reported)

    def _end(self, code: int) -> None:
        if not self._exit_code.done():
            self._exit_code.set_result(code)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):  # a bug: a new worker is better than one without this task
            self._fault(error)
            self._end(2)


def _prepare(frame: JobFrame, model: OpenModel) -> Job:
    """Prepare a request for the engine. Blocks; raises AppError."""
    return prepare_embedding(frame, model) if isinstance(frame, frames.Embed) else prepare(frame, model)


def _tokenize(frame: Tokenize, model: OpenModel) -> frames.Tokens:
    if frame.request is not None:
        prompt = prompt_of(frame.request, model)
    elif frame.messages is not None:
        prompt = model.prompts.from_messages(frame.messages)
    else:
        prompt = model.prompts.from_text(frame.prompt or "", add_special_tokens=frame.add_special_tokens)
    pieces = [model.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in prompt.ids]
    return frames.Tokens(id=frame.id, tokens=list(prompt.ids), pieces=pieces)


def _detokenize(frame: Detokenize, model: OpenModel) -> frames.Text:
    check_token_ids("tokens", frame.tokens, model.info.vocab)
    return frames.Text(id=frame.id, text=model.tokenizer.decode(frame.tokens))


async def _serve(descriptor: int) -> int:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    code = await Worker(reader, writer).serve()
    if code:
        os._exit(code)  # without waiting for threads or closing the device
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description="Engine process of one model; started by the daemon.")
    parser.add_argument("--fd", type=int, required=True, help="number of the inherited socket")
    faulthandler.enable()  # a crash in a library writes the calls of all threads to the log
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    return asyncio.run(_serve(parser.parse_args().fd))
