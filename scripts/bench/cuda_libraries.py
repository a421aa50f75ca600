"""Two CUDA libraries on this GPU: the same model in two processes that take turns, one process for each library.

`python scripts/bench/cuda_libraries.py WHEEL BUILT`: the library of `make wheel` and that of `make build CUDA=1`. The
process of the first one has neither nvcc nor a C compiler in its PATH, as after `pip install` on a machine without
compilers. `ratio` is the speed with the first library divided by the speed with the second. For prompts, `launching` is
the median of the milliseconds in which the host launched a step, and `allocations` the calls of cudaMalloc in all
rounds. A step that takes as long as its launches waits for the host, not for the GPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from cuda_models import FORMATS
from jobs import alternate, speed_ratio, spread
from programs import Answer, Job, Program
from rows import Row, parser, row, save
from shapes import SHAPES

NO_COMPILERS = {"PATH": "/nonexistent", "CC": "", "CUDA_HOME": "/nonexistent"}
STEPS = 24


def measure(options: argparse.Namespace) -> Iterator[Row]:
    device = torch.cuda.get_device_name()
    jobs = [Job("decode", rows, context, STEPS) for rows, context in ((1, 128), (8, 1024), (64, 1024))]
    jobs += [Job("prefill", 1, length) for length in (512, 2048)]
    for name in options.formats:
        settings = {"shape": options.shape, "quant": FORMATS[name], "rows": 64, "context": 2304}
        environments = {"wheel": _environment(options.wheel) | NO_COMPILERS, "built": _environment(options.built)}
        with ExitStack() as stack:
            with ThreadPoolExecutor() as pool:  # the models load at the same time
                start = partial(Program, "run_stepped.py", settings)
                programs = dict(zip(environments, pool.map(start, environments.values()), strict=True))
            for program in programs.values():
                stack.enter_context(program)
            facts = {label: program.hello for label, program in programs.items()}
            for job in jobs:
                yield _compared(f"{SHAPES[options.shape].name}, {name}", device, programs, job, options.rounds, facts)


def _environment(library: Path) -> dict[str, str]:
    return {"LOCALLLM_CUDA_LIBRARY": str(library.resolve())}


def _compared(
    title: str, device: str, programs: dict[str, Program], job: Job, rounds: int, facts: dict[str, object]
) -> Row:
    answers: dict[str, list[Answer]] = {label: [] for label in programs}
    calls: dict[str, Callable[[], float]] = {
        label: partial(_seconds, program, job, answers[label]) for label, program in programs.items()
    }
    times = alternate(calls, rounds)
    if job.kind == "prefill":
        timed = {label: each[-rounds:] for label, each in answers.items()}
        facts = facts | {
            "launching": {label: round(1e3 * _median(each, "launch_seconds"), 2) for label, each in timed.items()},
            "allocations": {label: sum(answer["allocations"] for answer in each) for label, each in timed.items()},
        }
    ratio = speed_ratio(times["wheel"], times["built"])
    scale = 1e3 / max(1, job.tokens)
    work = f"prefill of {job.context}" if job.kind == "prefill" else f"decode, {job.rows} x {job.context}"
    return row(
        f"{title}, {work}, library of the wheel without compilers",
        scale * statistics.median(times["wheel"]),
        "ms",
        peer=round(scale * statistics.median(times["built"]), 4),
        ratio=ratio.median,
        device=device,
        interval=[round(ratio.low, 3), round(ratio.high, 3)],
        spread=spread(times["wheel"]),
        rounds=rounds,
        **facts,
    )


def _seconds(program: Program, job: Job, answers: list[Answer]) -> float:
    answers.append(program.do(job))
    return float(answers[-1]["seconds"])


def _median(answers: list[Answer], name: str) -> float:
    return statistics.median(float(answer[name]) for answer in answers)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("wheel", type=Path)
    arguments.add_argument("built", type=Path)
    arguments.add_argument("--shape", choices=SHAPES, default="llama-8b")
    arguments.add_argument("--formats", type=lambda text: text.split(","), default=list(FORMATS))
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--save", default="cuda_libraries", help="name of the file of results; empty: none")
    options = arguments.parse_args()
    save(options.save, measure(options), part=True)


if __name__ == "__main__":
    main()
