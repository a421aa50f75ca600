"""Contestants: programs that hold a model and do jobs when asked, so that two can be timed in turns.

A contestant is a program of its own, started with its settings as one JSON argument. It loads, prints one line of
JSON about itself, then answers each line it reads, a job, with a line of JSON that has at least "seconds".
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal

Answer = dict[str, Any]

# Between two turns: threads of the one before that still spin for work have gone to sleep.
PAUSE = 0.15


@dataclass(frozen=True, slots=True)
class Job:
    """`prefill`: from a prompt of `context` new tokens in each row to the first answers. `decode`: `tokens` steps that
    follow such prompts, which are not timed. `read`: all threads read a large buffer once."""

    kind: Literal["prefill", "decode", "read"]
    rows: int = 1
    context: int = 0
    tokens: int = 0

    @property
    def counted(self) -> int:
        """Tokens whose rate is the result."""
        return self.rows * (self.context if self.kind == "prefill" else self.tokens)


class Contestant:
    """A program at work; use it as a context manager."""

    def __init__(self, program: str, settings: Mapping[str, object], environment: Mapping[str, str] | None = None):
        command = [sys.executable, str(Path(__file__).with_name(program)), json.dumps(settings)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, **(environment or {})},
        )
        self.hello = self._read()

    def do(self, job: Job, **how: object) -> Answer:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**asdict(job), **how}) + "\n")
        return self._read()

    def __enter__(self) -> Contestant:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _read(self) -> Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(map(str, self._process.args))} ended with {self._process.wait()}")  # type: ignore[arg-type]
        answer: Answer = json.loads(line)
        return answer


def serve(hello: Answer, do: Callable[..., Answer]) -> None:
    """A contestant's own loop: what it says of itself, then one answer for each job."""
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        print(json.dumps(do(**json.loads(line))), flush=True)


def settings() -> dict[str, Any]:
    """What this contestant was started with."""
    given: dict[str, Any] = json.loads(sys.argv[1])
    return given


def peak_memory() -> int:
    """Bytes of main memory this process has held at most, files it maps included; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


@dataclass(frozen=True, slots=True)
class Pair:
    """One turn of each: tokens per second, and bytes per second of the read stream between them."""

    ours: float
    read: float
    theirs: float = math.nan  # nobody


@dataclass(frozen=True, slots=True)
class Duel:
    pairs: list[Pair]

    @property
    def ours(self) -> float:
        return statistics.median(pair.ours for pair in self.pairs)

    @property
    def theirs(self) -> float:
        return statistics.median(pair.theirs for pair in self.pairs)

    @property
    def read(self) -> float:
        return statistics.median(pair.read for pair in self.pairs)

    @property
    def ratio(self) -> float:
        return statistics.median(pair.ours / pair.theirs for pair in self.pairs)

    def share(self, bytes_per_token: float) -> float:
        """Of what the read stream of the same pair would have given."""
        return statistics.median(pair.ours * bytes_per_token / pair.read for pair in self.pairs)


def duel(ours: Contestant, peer: Contestant | None, job: Job, how: Mapping[str, object], pairs: int) -> Duel:
    """The same job in turns, A B B A, after one that does not count; without a peer ours alone."""
    rate(ours, job)
    if peer is not None:
        rate(peer, job, how)
    return Duel([one_pair(ours, peer, job, how, ours_first=number % 2 == 0) for number in range(pairs)])


def one_pair(ours: Contestant, peer: Contestant | None, job: Job, how: Mapping[str, object], ours_first: bool) -> Pair:
    turns: dict[str, Callable[[], float]] = {
        "ours": lambda: rate(ours, job),
        "read": lambda: rate(ours, Job("read")),
    }
    if peer is not None:
        turns["theirs"] = partial(rate, peer, job, how)
    order = list(turns) if ours_first else list(reversed(turns))
    return Pair(**{name: turns[name]() for name in order})


def rate(contestant: Contestant, job: Job, how: Mapping[str, object] = MappingProxyType({})) -> float:
    """Tokens per second; of `read` bytes per second."""
    time.sleep(PAUSE)
    answer = contestant.do(job, **how)
    counted: float = answer.get("bytes", job.counted)
    return counted / float(answer["seconds"])
