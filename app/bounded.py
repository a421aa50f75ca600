"""Runs work on untrusted input in a child process with limits on time and memory.

The parent uses `BoundedChild`; the child calls `serve`. A message is its length (4 bytes, big-endian) and its body. The
top bit of the length marks the last reply of a child.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

LAST = 1 << 31  # bit of the length that marks the last reply
# Each thread pool gets one thread: with a thread per core, the address space may exceed the memory limit.
_POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
START_LIMIT = 60.0  # seconds of elapsed time for the start of a child and its first message


class ChildLost(Exception):
    """The child crashed, or was killed because it exceeded a limit; the message names the reason."""


class BoundedChild:
    """One child process that runs `module`. The first call, and the first call after a ChildLost, starts it.

    `cpu`: limit of the processor time of a call, in seconds. `wall`: limit of the elapsed time of a call, in seconds.
    `memory`: limit of the address space, in bytes. `hello` makes the first message to a new process; the time limits do
    not apply to this message. Thread-safe; calls run one after the other.
    """

    def __init__(self, module: str, *, cpu: float, wall: float, memory: int, hello: Callable[[], bytes]) -> None:
        self._arguments = [sys.executable, "-P", "-m", module, str(cpu), str(memory)]
        self._cpu = cpu
        self._wall = wall
        self._hello = hello
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def call(self, request: bytes) -> bytes:
        """Send a request to the child and return its reply. Raises ChildLost."""
        with self._lock:
            try:
                if self._child is None:
                    self._child = self._start()
                    self._exchange(self._child, self._hello(), START_LIMIT)
                return self._exchange(self._child, request, self._wall)
            except TimeoutError:
                self._drop()
                raise ChildLost(f"it took longer than {self._wall:g} s") from None
            except (EOFError, OSError):
                status = self._drop()
                if status in (-signal.SIGPROF, -signal.SIGALRM):
                    raise ChildLost(f"it took longer than {self._cpu:g} s of processor time") from None
                raise ChildLost("it crashed or exceeded its memory limit") from None

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _start(self) -> subprocess.Popen[bytes]:
        # The child gets no secrets (tokens, keys, proxies): only the variables that Python needs to import the package.
        environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
        environment |= dict.fromkeys(_POOLS, "1")
        child = subprocess.Popen(
            self._arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=environment,
            cwd="/",
        )
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        return child

    def _exchange(self, child: subprocess.Popen[bytes], request: bytes, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        _write(child, len(request).to_bytes(4, "big") + request, deadline)
        head = int.from_bytes(_read(child, 4, deadline), "big")
        body = _read(child, head & ~LAST, deadline)
        if head & LAST:
            self._drop()
        return body

    def _drop(self) -> int | None:
        """End the child. Returns its exit status; None if there is no child."""
        child = self._child
        self._child = None
        if child is None:
            return None
        try:
            child.wait(0.05)  # wait for the exit status of a child that ended by itself
        except subprocess.TimeoutExpired:
            child.kill()
        with child:  # closes the pipes and waits
            return child.wait()


def _write(child: subprocess.Popen[bytes], data: bytes, deadline: float) -> None:
    assert child.stdin is not None
    view = memoryview(data)
    while view:
        _wait(child.stdin.fileno(), selectors.EVENT_WRITE, deadline)
        view = view[os.write(child.stdin.fileno(), view) :]


def _read(child: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
    assert child.stdout is not None
    data = bytearray()
    while len(data) < size:
        _wait(child.stdout.fileno(), selectors.EVENT_READ, deadline)
        chunk = os.read(child.stdout.fileno(), size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, event)
        if not selector.select(max(0.0, deadline - time.monotonic())):
            raise TimeoutError


class Exhausted(Exception):
    """A handler ran out of memory or stack. The child sends `reply` and exits."""

    def __init__(self, reply: bytes) -> None:
        self.reply = reply


def serve(greet: Callable[[bytes], None], handle: Callable[[bytes], bytes]) -> None:
    """The main loop of the child: apply the limits from the command line, then reply to requests until the input ends.

    `greet` gets the first message. `handle` gets every other message and returns the reply, or raises Exhausted.
    """
    cpu = float(sys.argv[1])
    memory = int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process by closing the pipe
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source = sys.stdin.buffer
    sink = sys.stdout.buffer

    def reply(body: bytes, flag: int = 0) -> None:
        sink.write((len(body) | flag).to_bytes(4, "big") + body)
        sink.flush()

    greeted = False
    while len(head := source.read(4)) == 4:
        request = source.read(int.from_bytes(head, "big"))
        if not greeted:
            greet(request)
            greeted = True
            reply(b"")
            continue
        signal.setitimer(signal.ITIMER_PROF, cpu)  # SIGPROF ends the process, also in native code
        try:
            body = handle(request)
        except Exhausted as error:
            reply(error.reply, LAST)
            return
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        reply(body)
