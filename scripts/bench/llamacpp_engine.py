"""The engine on llama.cpp beside llama.cpp's own programs, with the same GGUF file of random weights.

`python scripts/bench/llamacpp_engine.py --tools FOLDER` needs llama-batched-bench and llama-server in the folder,
compiled from the source and with the flags of the installed llama-cpp-python. It measures, in the order of --parts:

- steps: tokens per second of decode and of prefill, beside llama-batched-bench with its fastest settings;
- work: the same in tokens per second of processor time, which another program does not slow down, beside the calls of
  llama-batched-bench (run_llamacpp.py) in the same process;
- load: time from the start of a load to the first token, in a new process with the file in the page cache, beside the
  same calls of llama.cpp (run_llamacpp.py);
- server: the daemon beside llama-server: tokens per second of 16 clients that share a system prompt of 1,000 tokens,
  and the time to the first token with and without a prefix hit.

`full_cache` is the speed of localllm while its KV cache has 4,096 positions of other prompts: llama.cpp reads them too.
The programs alternate (A B B A); results are medians over the pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import write_gguf
from programs import PAUSE
from rows import Row, parser, row, save
from shapes import SHAPES

from localllm.backends import llamacpp
from localllm.backends.machine import cores
from localllm.engine.engine import Engine
from localllm.engine.files.model_files import read_model
from localllm.engine.options import CacheLayout, LoadOptions
from localllm.engine.request import Request
from localllm.engine.runner import DeviceInfo, Runner

CONTEXT = 128  # tokens of each prompt before decode
STEPS = 48
STEP_TOKENS = 2048
WORK_STEPS = 8  # of decode, if processor time is measured
PROMPT = 512  # tokens of the timed prefill
FULL = 4096  # positions of other prompts
LOAD_PROMPT = 16  # tokens before the first token after a load
ENVIRONMENT = dict(os.environ)  # for other programs: without localllm's limit of spinning, which a load adds

Rates = Mapping[str, float]  # tokens per second of "prefill" and "decode"


class Work(NamedTuple):
    """For each number of rows: prompts of `context` tokens in each row, then `tokens` steps of decode."""

    counts: tuple[int, ...]
    context: int
    tokens: int

    def rates(self, rows: int, prefill: float, decode: float) -> Rates:
        """From seconds."""
        return {"prefill": rows * self.context / prefill, "decode": rows * self.tokens / decode}


class Localllm:
    """The engine with the model, in this process."""

    def __init__(self, bench: Bench, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: a function that returns seconds."""
        self._clock = clock
        self._options = LoadOptions(
            context=2 * PROMPT,
            max_rows=max(bench.counts),
            max_step_tokens=STEP_TOKENS,
            threads=bench.threads,
            cache_layout=bench.layout,
        )
        self._file = bench.file
        self._random = np.random.default_rng(0)
        self._requests = 0

    @cached_property
    def _runner(self) -> Runner:
        return llamacpp.open(read_model(self._file), self._options)

    def measure(self, work: Work) -> dict[int, Rates]:
        """With an empty prefix cache, as llama-batched-bench, which loads the model before and so wakes the GPU."""
        time.sleep(PAUSE)
        self._measure(work, min(work.counts), 0)
        return {rows: self._measure(work, rows, 0) for rows in work.counts}

    def measure_full(self, work: Work) -> dict[int, Rates]:
        """While FULL positions of other prompts are cached."""
        time.sleep(PAUSE)
        return {rows: self._measure(work, rows, FULL) for rows in work.counts}

    def _measure(self, work: Work, rows: int, cached: int) -> Rates:
        engine = Engine(self._runner)
        vocab = self._runner.spec.vocab_size
        for number in range(cached // PROMPT):
            engine.submit(Request(f"cached {number}", tuple(self._random.integers(0, vocab, PROMPT).tolist()), 1))
        while engine.has_work:
            engine.step()
        prompts = self._random.integers(0, vocab, (rows, work.context)).tolist()
        start = self._clock()
        for prompt in prompts:
            self._requests += 1
            engine.submit(Request(str(self._requests), tuple(prompt), work.tokens + 1))
        answered = 0
        while answered < rows:
            answered += sum(len(delta.tokens) for delta in engine.step())
        assert answered == rows, "the prompts do not fit one step, so the rows do not decode in parallel"
        prefill = self._clock() - start
        start = self._clock()
        while engine.has_work:
            engine.step()
        decode = self._clock() - start
        return work.rates(rows, prefill, decode)


class BatchedBench:
    """llama-batched-bench, which loads the model for each measurement. Its steps draw no tokens."""

    def __init__(self, tools: Path, file: Path, threads: int, layers: int, options: Sequence[str]) -> None:
        """`layers`: number of layers on the GPU; `options`: more arguments of the program."""
        self.options = " ".join(options)
        self._command = [str(tools / "llama-batched-bench"), "-m", str(file), "-t", str(threads), "-ngl", str(layers)]
        self._command += ["-b", str(STEP_TOKENS), "--output-format", "jsonl", *options]

    def measure(self, work: Work) -> dict[int, Rates]:
        time.sleep(PAUSE)
        counts = ",".join(map(str, work.counts))
        cells = max(work.counts) * (work.context + work.tokens)
        sizes = ["-npl", counts, "-npp", str(work.context), "-ntg", str(work.tokens), "-c", str(cells)]
        command = [*self._command, *sizes]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith('{"n_kv_max"')]
        figures = map(json.loads, lines)
        return {figure["pl"]: work.rates(figure["pl"], figure["t_pp"], figure["t_tg"]) for figure in figures}


class Bench:
    """One model, and the parameters of the measurements."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.pairs: int = options.pairs
        self.counts = [int(count) for count in options.rows.split(",")]
        self.threads: int = options.threads or cores()
        self.tools: Path = options.tools
        self.file = Path(options.folder) / f"{options.shape}-{options.recipe}.gguf"
        self.layout: CacheLayout = options.layout
        self.gpu: bool = options.gpu
        self.device = ""
        self.title = f"llama.cpp, {SHAPES[options.shape].name}, {options.recipe}"
        if self.layout != "shared":
            self.title += f", cache_layout {self.layout}"
        self._write(SHAPES[options.shape], options.recipe)
        if self.gpu:
            device = llamacpp.probe()
            assert isinstance(device, DeviceInfo), device
            self.device = device.name

    def _write(self, shape: Any, recipe: str) -> None:
        write_gguf.write(shape, recipe, self.file, random_blocks=True)

    def row(self, name: str, value: float, peer: float, unit: str, ratios: Sequence[float], **more: object) -> Row:
        ratio = statistics.median(ratios)
        facts = {"ratios": [round(each, 3) for each in ratios], "threads": self.threads, **more}
        return row(f"{self.title}, {name}", value, unit, peer=round(peer, 4), ratio=ratio, device=self.device, **facts)

    def peers(self) -> list[BatchedBench]:
        """llama-batched-bench with one cache for all rows, and with one for each."""
        layers = 99 if self.gpu else 0
        return [BatchedBench(self.tools, self.file, self.threads, layers, [option]) for option in ("-kvu", "-no-kvu")]


def steps(bench: Bench) -> Iterator[Row]:
    localllm = Localllm(bench)
    peers = bench.peers()
    yield from _compare(bench, localllm, peers, Work(tuple(bench.counts), CONTEXT, STEPS), "decode")
    yield from _compare(bench, localllm, peers[:1], Work((1,), PROMPT, 1), "prefill")  # one row has one cache


def _compare(bench: Bench, localllm: Localllm, peers: Sequence[BatchedBench], work: Work, kind: str) -> Iterator[Row]:
    localllm.measure(work)
    trials = {peer: peer.measure(work) for peer in peers}
    fastest = {rows: max(trials, key=lambda peer: trials[peer][rows][kind]) for rows in work.counts}
    measured: list[dict[object, dict[int, Rates]]] = []
    for number in range(bench.pairs):
        programs: list[Any] = [localllm, *dict.fromkeys(fastest.values())]
        measured.append({program: program.measure(work) for program in programs[:: 1 if number % 2 == 0 else -1]})
    full = [localllm.measure_full(work) for _ in range(bench.pairs)]
    for rows in work.counts:
        values = [results[localllm][rows][kind] for results in measured]
        against = [results[fastest[rows]][rows][kind] for results in measured]
        ratios = [value / other for value, other in zip(values, against, strict=True)]
        title = f"{kind}, {rows} row{'s' * (rows > 1)} of {work.context} tokens"
        medians = statistics.median(values), statistics.median(against)
        facts = {
            "against": f"llama-batched-bench {fastest[rows].options}",
            "full_cache": round(statistics.median(rates[rows][kind] for rates in full), 2),
        }
        yield bench.row(title, *medians, "tokens/s", ratios, **facts)


def work(bench: Bench) -> Iterator[Row]:
    """Tokens per second of processor time, beside the calls of llama-batched-bench in this process."""
    from run_llamacpp import LlamaCpp

    localllm = Localllm(bench, clock=time.process_time)
    peer = LlamaCpp(str(bench.file), bench.threads, mmap=True, gpu=bench.gpu)
    jobs = [(rows, Work((rows,), CONTEXT, WORK_STEPS), "decode") for rows in bench.counts]
    for rows, job, kind in [*jobs, (1, Work((1,), PROMPT, 1), "prefill")]:
        values: list[float] = []
        against: list[float] = []
        for _ in range(bench.pairs + 1):  # the first pair is a warm-up
            values.append(localllm.measure(job)[rows][kind])
            against.append(_processor_rate(peer, rows, job, kind))
        ratios = [value / other for value, other in zip(values[1:], against[1:], strict=True)]
        title = f"{kind}, {rows} row{'s' * (rows > 1)} of {job.context} tokens, processor time"
        medians = statistics.median(values[1:]), statistics.median(against[1:])
        yield bench.row(title, *medians, "tokens/s", ratios, against="the calls of llama-batched-bench")


def _processor_rate(peer: Any, rows: int, job: Work, kind: str) -> float:
    peer.do("decode", rows, job.context, 1)  # computes the prompts, if decode is measured
    start = time.process_time()
    peer.do(kind, rows, job.context, job.tokens)
    tokens = job.context if kind == "prefill" else job.tokens
    return rows * tokens / (time.process_time() - start)


def load(bench: Bench) -> Iterator[Row]:
    """Each load is in a new process. `ours` includes the header of the file and the plan of the memory."""
    settings = json.dumps({"file": str(bench.file), "threads": bench.threads, "gpu": bench.gpu})
    commands = {name: [sys.executable, __file__, f"--first-token={name}", settings] for name in FIRST_TOKENS}
    times: dict[str, list[float]] = {name: [] for name in commands}
    for name in commands:
        _seconds(commands[name])
    for number in range(bench.pairs):
        for name in commands if number % 2 == 0 else reversed(commands):
            times[name].append(_seconds(commands[name]))
    ratios = [peer / ours for ours, peer in zip(times["localllm"], times["llama.cpp"], strict=True)]
    medians = statistics.median(times["localllm"]), statistics.median(times["llama.cpp"])
    yield bench.row("load to the first token", *medians, "s", ratios, against="the calls of llama.cpp")


def _seconds(command: Sequence[str]) -> float:
    time.sleep(PAUSE)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def first_token_of_localllm(file: str, threads: int, gpu: bool) -> float:
    start = time.perf_counter()
    options = LoadOptions(context=PROMPT, max_rows=16, max_step_tokens=STEP_TOKENS, threads=threads)
    engine = Engine(llamacpp.open(read_model(Path(file)), options))
    engine.submit(Request("first", tuple(range(LOAD_PROMPT)), 1))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start


def first_token_of_llamacpp(file: str, threads: int, gpu: bool) -> float:
    from run_llamacpp import LlamaCpp

    start = time.perf_counter()
    program = LlamaCpp(file, threads, mmap=True, gpu=gpu)
    program.do("prefill", 1, LOAD_PROMPT, 0)
    return time.perf_counter() - start


FIRST_TOKENS: Mapping[str, Callable[[str, int, bool], float]] = {
    "localllm": first_token_of_localllm,
    "llama.cpp": first_token_of_llamacpp,
}
PARTS: Mapping[str, Callable[[Bench], Iterator[Row]]] = {"steps": steps, "work": work, "load": load}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--tools", type=Path, help="folder of llama.cpp's programs")
    arguments.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    arguments.add_argument("--recipe", choices=write_gguf.RECIPES, default="q8_0")
    arguments.add_argument("--folder", default="build/bench", help="folder for the model")
    arguments.add_argument("--layout", choices=get_args(CacheLayout), default="shared", help="setting cache_layout")
    arguments.add_argument("--rows", default="1,8,16")
    arguments.add_argument("--parts", default=",".join(PARTS))
    arguments.add_argument("--pairs", type=int, default=5)
    arguments.add_argument("--threads", type=int, help="default: physical cores")
    arguments.add_argument("--gpu", action="store_true", help="all layers on the GPU")
    arguments.add_argument("--save", default="llamacpp", help="which results to replace; empty: none")
    arguments.add_argument("--first-token", choices=FIRST_TOKENS, help=argparse.SUPPRESS)
    arguments.add_argument("settings", nargs="?", type=json.loads, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.first_token:
        print(FIRST_TOKENS[options.first_token](**options.settings))
        return
    bench = Bench(options)
    for part in options.parts.split(","):
        for figure in PARTS[part](bench):
            save(options.save, [figure], part=True)  # at once: a later measurement may fail


if __name__ == "__main__":
    main()
