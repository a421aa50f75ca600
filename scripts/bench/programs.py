"""Programs that load a model and do jobs on request, so that two of them can be measured alternately.

A program is a process of its own, started with its settings as one JSON argument. It loads the model and prints one
line of JSON about itself. Then it reads jobs, one line of JSON each, and prints a line of JSON for each job, with at
least "seconds".
"""

from __future__ import annotations

import argparse
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

# Seconds before a measurement: idle threads of the other program may spin until then.
PAUSE = 0.15


@dataclass(frozen=True, slots=True)
class Job:
    """`prefill`: compute a prompt of `context` new tokens in each row, up to the first answers. `decode`: make `tokens`
    steps after such prompts; the prompts are not timed. `read`: read a large buffer once with all threads."""

    kind: Literal["prefill", "decode", "read"]
    rows: int = 1
    context: int = 0
    tokens: int = 0

    @property
    def counted(self) -> int:
        """The tokens whose rate is measured."""
        return self.rows * (self.context if self.kind == "prefill" else self.tokens)


class Program:
    """A running program; use it as a context manager."""

    def __init__(self, script: str, settings: Mapping[str, object], environment: Mapping[str, str] | None = None):
        """`script`: a file in this folder that calls `serve`."""
        command = [sys.executable, str(Path(__file__).with_name(script)), json.dumps(settings)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, **(environment or {})},
        )
        self.hello = self._read()

    def do(self, job: Job, **options: object) -> Answer:
        """Wait for the answer to a job. `options` are for this program only."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**asdict(job), **options}) + "\n")
        return self._read()

    def __enter__(self) -> Program:
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
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(map(str, self._process.args))} ended with {self._process.wait()}")  # type: ignore[arg-type]
        answer: Answer = json.loads(line)
        return answer


def serve(hello: Answer, do: Callable[..., Answer]) -> None:
    """The main loop of a program: print `hello`, then answer each job."""
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        print(json.dumps(do(**json.loads(line))), flush=True)


def settings(description: str | None) -> dict[str, Any]:
    """The settings that this program was started with. `description` is for --help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", type=json.loads, help="a JSON object")
    parsed: dict[str, Any] = parser.parse_args().settings
    return parsed


def peak_memory() -> int:
    """Peak main memory of this process in bytes, with mapped files; 0 if the system does not report it."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    for line in status.read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


@dataclass(frozen=True, slots=True)
class Pair:
    """One measurement of each program in tokens per second, and of the read bandwidth in bytes per second."""

    localllm: float
    read: float
    peer: float = math.nan  # NaN: measured without a peer


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians over several pairs of measurements."""

    pairs: list[Pair]

    @property
    def localllm(self) -> float:
        return statistics.median(pair.localllm for pair in self.pairs)

    @property
    def peer(self) -> float:
        return statistics.median(pair.peer for pair in self.pairs)

    @property
    def read(self) -> float:
        return statistics.median(pair.read for pair in self.pairs)

    @property
    def ratio(self) -> float:
        return statistics.median(pair.localllm / pair.peer for pair in self.pairs)

    def share(self, bytes_per_token: float) -> float:
        """The share of the bound: speed divided by the speed that the read bandwidth of the same pair allows."""
        return statistics.median(pair.localllm * bytes_per_token / pair.read for pair in self.pairs)


def compare(localllm: Program, peer: Program | None, job: Job, options: Mapping[str, object], pairs: int) -> Comparison:
    """Measure the same job alternately (A B B A) after a warm-up; without a peer, localllm alone. `options`: of the
    peer."""
    rate(localllm, job)
    if peer is not None:
        rate(peer, job, options)
    measured = [measure_pair(localllm, peer, job, options, localllm_first=number % 2 == 0) for number in range(pairs)]
    return Comparison(measured)


def measure_pair(
    localllm: Program, peer: Program | None, job: Job, options: Mapping[str, object], localllm_first: bool
) -> Pair:
    measurements: dict[str, Callable[[], float]] = {
        "localllm": lambda: rate(localllm, job),
        "read": lambda: rate(localllm, Job("read")),
    }
    if peer is not None:
        measurements["peer"] = partial(rate, peer, job, options)
    order = list(measurements)
    if not localllm_first:
        order.reverse()
    return Pair(**{name: measurements[name]() for name in order})


def rate(program: Program, job: Job, options: Mapping[str, object] = MappingProxyType({})) -> float:
    """Tokens per second; for a `read` job bytes per second."""
    time.sleep(PAUSE)
    answer = program.do(job, **options)
    counted: float = answer.get("bytes", job.counted)
    return counted / float(answer["seconds"])
