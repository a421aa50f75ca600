"""Drives a real worker process over its socket, without an event loop."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import msgspec

from localllm.app import frames
from localllm.app.frames import Failed, Finished, Piece, PieceLogprob, Started
from localllm.engine.options import LoadOptions

_decoder = msgspec.msgpack.Decoder(frames.FromWorker)


@dataclass
class Result:
    """All frames about one request."""

    frames: list[Any] = field(default_factory=list)

    @property
    def end(self) -> Finished | Failed:
        return self.frames[-1]

    @property
    def started(self) -> Started:
        return self.frames[0]

    def pieces(self, choice: int = 0) -> list[Piece]:
        return [frame for frame in self.frames if isinstance(frame, Piece) and frame.choice == choice]

    def text(self, choice: int = 0) -> str:
        return "".join(piece.text for piece in self.pieces(choice))

    def finish(self, choice: int = 0) -> str | None:
        *others, last = [piece.finish for piece in self.pieces(choice)]
        assert others == [None] * len(others)
        return last

    def logprobs(self, choice: int = 0) -> list[PieceLogprob]:
        return [entry for piece in self.pieces(choice) for entry in piece.logprobs]

    def calls(self, choice: int = 0) -> list[tuple[str, str]]:
        """(name, arguments) of each tool call, joined by index."""
        joined: dict[int, tuple[str, str]] = {}
        for piece in self.pieces(choice):
            for call in piece.tool_calls:
                name, arguments = joined.get(call.index, ("", ""))
                joined[call.index] = name + call.name, arguments + call.arguments
        return [joined[index] for index in sorted(joined)]


class WorkerProcess:
    def __init__(self) -> None:
        daemon_end, worker_end = socket.socketpair()
        with worker_end:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "localllm.app.worker", "--fd", str(worker_end.fileno())],
                pass_fds=(worker_end.fileno(),),
                stderr=subprocess.PIPE,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self.socket = daemon_end
        daemon_end.settimeout(100)

    def send(self, *sent: frames.Frame) -> None:
        self.socket.sendall(b"".join(map(frames.pack, sent)))

    def read(self) -> Any:
        """The next frame. Raises EOFError if the worker has ended."""
        return _decoder.decode(self._exactly(int.from_bytes(self._exactly(4), "big")))

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def load(self, path: object, **options: Any) -> Any:
        """Load a model; returns Loaded or LoadFailed. `options`: fields of LoadOptions, the backend, and `shared`."""
        backend = options.pop("backend", "cpu")
        shared = options.pop("shared", ())
        load = LoadOptions(threads=1, **options)
        self.send(frames.Load(model="tiny", path=str(path), backend=backend, options=load, shared=shared))
        while isinstance(frame := self.read(), frames.Loading):
            pass
        return frame

    def ask(self, frame: frames.Frame) -> Any:
        """Send one frame and read its reply."""
        self.send(frame)
        return self.read()

    def generate(self, *requests: frames.Generate | frames.Embed) -> list[Result]:
        """Send requests together and read until each has ended."""
        self.send(*requests)
        return self.collect([frame.id for frame in requests])

    def collect(self, ids: list[str]) -> list[Result]:
        results = {name: Result() for name in ids}
        running = set(ids)
        while running:
            frame = self.read()
            results[frame.id].frames.append(frame)
            if isinstance(frame, (Finished, Failed)):
                running.remove(frame.id)
        return [results[name] for name in ids]

    def close(self) -> tuple[int, str]:
        """Close the connection; returns the exit code and the log."""
        self.socket.close()
        _, log = self.process.communicate(timeout=100)
        return self.process.returncode, log.decode()
