"""The start time of commands with a warm file cache; the target for --help is 100 ms.

`python scripts/bench/startup.py [RUNS]`: `ours` is the median, `peer` the start of Python without a program.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rows import Row, parser, row, save

BARE = [sys.executable, "-c", "pass"]
PROGRAM = str(Path(sys.executable).with_name("localllm"))
COMMANDS = ("--help", "run --help", "serve --help", "config", "list")
LARGE = ("torch", "numpy", "textual", "httpx", "huggingface_hub", "rich", "asyncio", "msgspec")


def milliseconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return 1e3 * (time.perf_counter() - start)


def imported_at_help() -> list[str]:
    """The large modules that `localllm --help` imports."""
    code = "import sys; from localllm.app.cli import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stderr.split()
    return [name for name in LARGE if name in loaded]


def measure(runs: int) -> Iterator[Row]:
    for words in COMMANDS:
        command = [PROGRAM, *words.split()]
        milliseconds(command)  # fills the file cache
        pairs = [(milliseconds(command), milliseconds(BARE)) for _ in range(runs)]
        times, bare_times = zip(*pairs, strict=True)
        ours = statistics.median(times)
        bare = statistics.median(bare_times)
        p90 = sorted(times)[int(runs * 0.9)]
        yield row(f"start, localllm {words}", ours, "ms", peer=round(bare, 2), ratio=bare / ours, p90=round(p90, 2))


if __name__ == "__main__":
    arguments = parser(__doc__, "startup")
    arguments.add_argument("runs", type=int, nargs="?", default=30)
    options = arguments.parse_args()
    save(options.save, measure(options.runs))
    print("large modules at --help:", ", ".join(imported_at_help()) or "none")
