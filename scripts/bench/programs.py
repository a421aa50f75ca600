"""Programs that load a model and do jobs on request, so that several of them can be measured in turns.

A program is a process of its own, started with its settings as one JSON argument. It loads the model and prints one
line of JSON about itself. Then it reads jobs, one line of JSON each, and prints a line of JSON for each job, with at
least "seconds".
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

PAUSE = 0.2  # seconds before a job: idle threads of the program measured before may spin until then
JOB = re.compile(r"(decode|profile|prefill|hit|requests):(?:(\d+)x)?(\d+)(?:@(\d+))?")

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """`decode`: after a prompt of `context` tokens in each row, make `steps` steps; only these are timed. `profile`:
    the same, with the times of the kernels on stderr. `prefill`: compute the prompts up to the first tokens. `hit`: the
    same for prompts that were computed before. `requests`: answer `rows` requests of random lengths up to `context`.
    `read`: measure the read bandwidth."""

    kind: Literal["decode", "profile", "prefill", "hit", "requests", "read"]
    rows: int = 1
    context: int = 0
    steps: int = 0
    adapters: int = 0  # different adapters, which the rows use in turn; 0: the base model

    @classmethod
    def parse(cls, text: str) -> Job:
        """From KIND:[ROWSx]CONTEXT[@ADAPTERS]. Raises argparse.ArgumentTypeError."""
        match = JOB.fullmatch(text)
        if not match:
            raise argparse.ArgumentTypeError(f"{text}: not such as decode:8x1024, prefill:512 or decode:64x128@8")
        kind, rows, context, adapters = match.groups(default="")
        return cls(kind, int(rows or 1), int(context), adapters=int(adapters or 0))  # type: ignore[arg-type]

    def __str__(self) -> str:
        rows = f"{self.rows} row{'s' * (self.rows > 1)} of {self.context} tokens"
        adapters = f", {self.adapters} adapters" * bool(self.adapters)
        if self.kind == "requests":
            return f"{self.rows} requests of up to {self.context} in and out{adapters}"
        return f"{self.kind}, {rows}{adapters}"


class Program:
    """A running program. `close` ends it."""

    def __init__(
        self, label: str, script: str, settings: Mapping[str, object], environment: Mapping[str, str] | None = None
    ) -> None:
        """`script`: a file in this folder that calls `serve`."""
        self.label = label
        command = [sys.executable, str(Path(__file__).with_name(script)), json.dumps(settings)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
        )
        self.hello = self._read()

    def do(self, job: Job) -> Answer:
        assert self._process.stdin is not None
        time.sleep(PAUSE)
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        try:
            self._process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _read(self) -> Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.label} ended with status {self._process.wait()}")
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
    match = re.search(r"VmHWM:\s+(\d+)", status.read_text()) if status.exists() else None
    return 1024 * int(match[1]) if match else 0
