"""The overhead of a decode step: the time of a model with 28 layers and almost no arithmetic, through the engine.

`python scripts/bench/overhead.py [STEPS]`: microseconds of a step for planning, Python, op calls, and starting and
joining threads. `target` is the limit at one row.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import weights
from rows import Row, parser, row, save
from shapes import HOLLOW

from localllm.backends import cpu
from localllm.engine.engine import Engine
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.request import Request

TARGET = 1000.0  # µs


def microseconds(rows: int, steps: int) -> list[float]:
    """The time of each step while `rows` rows decode."""
    with tempfile.TemporaryDirectory() as name:
        weights.write(HOLLOW, Path(name))
        engine = Engine(cpu.open(read_model(name), LoadOptions(context=steps + 64, max_rows=rows)))
    for number in range(rows):
        engine.submit(Request(str(number), (1, 2, 3), steps + 2))
    for _ in range(3):
        engine.step()
    times = []
    for _ in range(steps - 10):
        start = time.perf_counter()
        engine.step()
        times.append(1e6 * (time.perf_counter() - start))
    return times


def measure(steps: int) -> Iterator[Row]:
    for rows in (1, 16):
        times = sorted(microseconds(rows, steps))
        p90 = round(times[int(len(times) * 0.9)], 1)
        yield row(f"{HOLLOW.name}, decode step, {rows} rows", statistics.median(times), "µs", p90=p90, target=TARGET)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("steps", type=int, nargs="?", default=400)
    save("overhead", measure(arguments.parse_args().steps))
