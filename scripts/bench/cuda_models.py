"""Models on a GPU, through the engine: decode steps, prompts, throughput, and idle time of the GPU.

`python scripts/bench/cuda_models.py --shape qwen3-0.6b,llama-8b --ways full,off`. Weights are random. The program
checks outputs first; if an output is wrong, it measures nothing. `--ways` lists values of the option `graphs`; with
`/in-turn` a step is planned after the results of the step before, with `/one-queue` shared experts never run on a
second queue of the GPU. The ways alternate round by round. Each is compared with the last way, and with a peer:
transformers in eager mode (`--peers transformers`, bf16) or llama.cpp of llama-cpp-python (`--peers llama.cpp`). The
peak rates of the device are measured before and after. Any backend can run it: `--backend cpu --shape tiny` is a test
of the program.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import outputs
import torch
from jobs import JOBS, PeakRates, Peer, Setting, random_requests
from rows import Row, parser, row, save
from shapes import SHAPES, Shape
from stepping import Stepped
from weights import stand_in

from localllm import backends
from localllm.backends.machine import cores
from localllm.backends.pytorch.graphs.runner import GraphRunner
from localllm.engine.files.model_files import ModelFiles
from localllm.engine.options import CacheDtype, Compiler, Graphs, LoadOptions, Queues
from localllm.engine.request import Sampling
from localllm.engine.runner import Backend, Unavailable, page_bytes
from localllm.kernels.gpu.limits import gpu_limits

if TYPE_CHECKING:
    from gpu_peaks import Peaks

FORMATS: Mapping[str, str] = {"bf16": "none", "int8": "int8", "int4": "int4", "fp8": "fp8", "fp8_w8a8": "fp8_w8a8"}
PEER_FORMATS: Mapping[str, tuple[str, ...]] = {"transformers": ("bf16",), "llama.cpp": tuple(FORMATS)}
CELLS = [(rows, context) for context in (128, 1024, 8192) for rows in (1, 8, 16, 64) if rows * context <= 2**17]
MAX_DRIFT = 0.02  # of a peak rate without a warning
STARTED = time.perf_counter()
SPARE = 96  # positions for the steps before and after the timed steps

Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a model."""

    name: str
    graphs: Graphs
    overlap: bool  # a step starts before the results of the step before are read
    queues: Queues

    @classmethod
    def parse(cls, text: str) -> Way:
        graphs, *more = text.split("/")
        if graphs not in get_args(Graphs) or not {"in-turn", "one-queue"}.issuperset(more):
            ways = ", ".join(get_args(Graphs))
            raise argparse.ArgumentTypeError(f"{text}: one of {ways}, maybe with /in-turn or /one-queue")
        queues: Queues = "one" if "one-queue" in more else "measured"
        return cls(text, graphs, "in-turn" not in more, queues)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Job:
    """One of JOBS, and the ways that do it; empty: all ways."""

    name: str
    ways: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Job:
        name, _, ways = text.partition(":")
        if name not in JOBS:
            raise argparse.ArgumentTypeError(f"{name}: not among {', '.join(JOBS)}")
        return cls(name, tuple(ways.split("+")) if ways else ())

    def does(self, way: str) -> bool:
        return not self.ways or way in self.ways


def main() -> None:
    options = _options()
    failed: list[str] = []
    checked: set[Graphs] = set()
    for name in options.shape:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            files = stand_in(SHAPES[name], Path(folder))
            formats = [measure(options, name, fmt, files, checked, failed) for fmt in options.formats]
            save("" if options.unchecked else options.save, chain.from_iterable(formats), part=True)
    if failed:
        sys.exit(f"these jobs failed: {', '.join(failed)}")


def measure(
    options: argparse.Namespace, name: str, fmt: str, files: ModelFiles, checked: set[Graphs], failed: list[str]
) -> Iterator[Row]:
    """The rows of one shape in one format.

    Adds the names of failed jobs to `failed`. The models with known tokens run only with graphs that are not in
    `checked`, and add these."""
    shape = SHAPES[name]
    choice = backends.choose(options.backend, files)
    gpu = "" if choice.info.main_memory else choice.info.name
    title = fmt if options.cache_dtype == "auto" else f"{fmt}, {options.cache_dtype} cache"

    def titled(name: str, ours: float, unit: str, **more: Any) -> Row:
        return row(f"{shape.name}, {title}, {name}", ours, unit, device=gpu, **more)

    budget = LoadOptions(
        quant=FORMATS[fmt],  # type: ignore[arg-type]
        cache_dtype=options.cache_dtype,
        compiler=options.compiler,
        max_step_tokens=options.step_tokens,
        page_size=options.page_size,
    )
    if not options.unchecked:
        checks = outputs.Checks(choice.backend, shape, files, fmt, budget, options.check_layers)
        yield from _check(checks, options, checked, titled)
    if not options.jobs:
        return
    before = _peaks() if gpu else None
    if before is not None:
        yield titled("ceiling, read", before.read / 1e9, "GB/s", rounds=before.rounds)
        yield titled("ceiling, copy", before.copy / 1e9, "GB/s", rounds=before.rounds)
        yield titled("ceiling, bf16 product of 8192³", before.multiply / 1e12, "TFLOP/s", rounds=before.rounds)
    peaks = PeakRates() if before is None else PeakRates(before.read, before.multiply)
    with ExitStack() as stack:
        ways = []
        for way in options.ways:
            jobs = {job.name for job in options.jobs if job.does(way.name)}
            if not jobs:
                continue
            room = replace(budget, **_room(options, jobs, shape, gpu))
            stepped, figure = _opened(choice.backend, files, room, way, titled)
            stack.callback(stepped.close)
            ways.append(stepped)
            yield figure
        peer = _peer(options, fmt, name, files, gpu)
        if peer is not None:
            stack.callback(peer.close)
        setting = replace(_setting(options, shape, titled), ways=ways, peer=peer, peaks=peaks, has_trace=bool(gpu))
        yield from _run_jobs(options.jobs, setting, failed)
    if before is not None:
        yield _drift(before, titled)


def _check(
    checks: outputs.Checks, options: argparse.Namespace, checked: set[Graphs], titled: Callable[..., Row]
) -> Iterator[Row]:
    """Check the outputs of all ways. Raises outputs.WrongOutput."""
    for graphs in dict.fromkeys(way.graphs for way in options.ways):
        yield _near(checks, graphs, titled)
        if graphs not in checked:
            yield _exact(checks, graphs, options.canary, titled)
            checked.add(graphs)


def _run_jobs(jobs: list[Job], setting: Setting, failed: list[str]) -> Iterator[Row]:
    for job in jobs:
        try:
            ways = [way for way in setting.ways if job.does(way.label)]
            yield from JOBS[job.name](replace(setting, ways=ways))
            _log(f"{job.name}: done")
        except Exception:  # continue with the other jobs
            traceback.print_exc()
            failed.append(job.name)


def _drift(before: Peaks, titled: Callable[..., Row]) -> Row:
    """The largest change of a peak rate since `before`, with a warning if it is large."""
    changes = _peaks().changes(before)
    for name, change in changes.items():
        if abs(change) > MAX_DRIFT:
            _log(f"the peak rate of {name} has changed by {change:+.1%}: shares of the bound do not count")
    percent = {name: round(100 * change, 2) for name, change in changes.items()}
    largest = max(map(abs, percent.values()))
    return titled("ceilings, largest change meanwhile", largest, "%", rounds=2, **percent)


def _setting(options: argparse.Namespace, shape: Shape, titled: Callable[..., Row]) -> Setting:
    return Setting(
        shape,
        titled,
        rounds=options.rounds,
        cells=options.cells,
        steps=options.steps,
        lengths=options.lengths,
        max_length=options.longest,
        requests=options.requests,
        max_tokens=options.most,
        runs=options.runs,
        sampling=Sampling(temperature=options.temperature),
    )


def _near(checks: outputs.Checks, graphs: Graphs, titled: Callable[..., Row]) -> Row:
    """Compare log-probabilities with the references."""
    difference = checks.log_probabilities(graphs)
    _log(f"graphs {graphs}: log-probabilities checked")
    return titled(
        f"log-probabilities against float32 references, graphs {graphs}",
        1e3 * difference.mean,
        "millinats",
        most=round(1e3 * difference.max, 2),
        compared=difference.compared,
        layers=checks.layers,
    )


def _exact(checks: outputs.Checks, graphs: Graphs, rows: list[int], titled: Callable[..., Row]) -> Row:
    """Compare the tokens of the canary model and of guide with the expected ones."""
    right = checks.canary(graphs, rows) + checks.guide(graphs)
    _log(f"graphs {graphs}: the canary model and guide checked")
    return titled(f"tokens of the canary model and guide, all right, graphs {graphs}", right, "tokens")


def _log(message: str) -> None:
    """Print progress, with the time since the start."""
    print(f"{time.perf_counter() - STARTED:6.1f} s  {message}", file=sys.stderr, flush=True)


def _peaks() -> Peaks:
    from gpu_peaks import peaks

    return peaks()


def _opened(
    backend: Backend, files: ModelFiles, budget: LoadOptions, way: Way, titled: Callable[..., Row]
) -> tuple[Stepped, Row]:
    """Load a model. Returns its engine, and a row with the load time and the memory besides weights and cache."""
    free = _free(backend)
    start = time.perf_counter()
    runner = backend.open(files, replace(budget, graphs=way.graphs, queues=way.queues))
    seconds = time.perf_counter() - start
    spec = runner.spec
    beyond = free - _free(backend) - spec.weight_bytes - spec.cache_bytes
    more: dict[str, object] = {"beyond_gib": round(beyond / 2**30, 3)} if free else {}
    if isinstance(runner, GraphRunner):
        more["recorded_in"] = round(runner.capture_seconds, 2)
        if runner.second_queue_tokens:
            more["second_queue"] = runner.second_queue_tokens
    _log(f"{way.name}: open, {spec}")
    stepped = Stepped(way.name, runner, overlap=way.overlap)
    _log(f"{way.name}: its cache filled")
    return stepped, titled(f"open, {way.name}", seconds, "s", rounds=1, **more)


def _free(backend: Backend) -> int:
    """Free bytes of the GPU's memory; 0 without a GPU."""
    if isinstance(info := backend.probe(), Unavailable) or info.main_memory:
        return 0
    gc.collect()  # frees closed runners
    torch.cuda.empty_cache()
    free, _ = gpu_limits().limit_memory(*torch.cuda.mem_get_info())
    return free


def _room(options: argparse.Namespace, jobs: set[str], shape: Shape, gpu: str) -> dict[str, Any]:
    """The limits that the largest job needs, as fields of LoadOptions."""
    page = options.page_size
    together: list[list[int]] = []  # of each job: tokens of the requests that run together
    if "prefill" in jobs:
        together += [[length] for length in options.lengths]
    if "sweep" in jobs:
        together += [[options.longest]]
    if jobs & {"decode", "idle", "kernels"}:  # the first row decodes while the prompts of the last rows are skipped
        together += [
            [context + 3 * options.steps + rows * context // options.step_tokens] * rows
            for rows, context in options.cells
        ]
    if "mixed" in jobs:
        prompts, counts = random_requests(options.requests, options.most)
        together += [[len(prompt) + count for prompt, count in zip(prompts, counts, strict=True)]]
    if "even" in jobs:
        together += [[2 * options.most] * options.requests]
    pages = max(sum((tokens + SPARE) // page + 1 for tokens in each) for each in together)
    return {
        "context": min(shape.positions, max(map(max, together)) + SPARE),
        "max_rows": max(map(len, together)),
        "cache_bytes": pages * page_bytes(page, shape.kv_heads, shape.head_dim, shape.layers, 2 if gpu else 4),
    }


def _peer(options: argparse.Namespace, fmt: str, name: str, files: ModelFiles, gpu: str) -> Peer | None:
    """The first program of --peers that has the format; None: no program, or it does not run here."""
    for peer in options.peers:
        if fmt not in PEER_FORMATS[peer]:
            continue
        try:
            return _open_peer(peer, fmt, name, files, gpu)
        except Exception:  # e.g. an unsupported release of the program
            traceback.print_exc()
            _log(f"{peer} does not run here: not measured")
    return None


def _open_peer(peer: str, fmt: str, name: str, files: ModelFiles, gpu: str) -> Peer:
    if peer == "llama.cpp":
        from llamacpp_steps import LlamaCpp

        return LlamaCpp(name, fmt, files.path, max(1, cores() // 2), bool(gpu))
    from transformers_steps import Transformers

    return Transformers(SHAPES[name], files, "cuda" if gpu else "cpu")


def _options() -> argparse.Namespace:
    arguments = parser(__doc__)

    def words(allowed: Mapping[str, object] | tuple[str, ...]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            chosen = [word for word in text.split(",") if word]
            if unknown := set(chosen) - set(allowed):
                raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not among {', '.join(allowed)}")
            return chosen

        return parse

    def each(parse: Callable[[str], Parsed]) -> Callable[[str], list[Parsed]]:
        return lambda text: [parse(word) for word in text.split(",") if word]

    def cell(text: str) -> tuple[int, int]:
        rows, _, context = text.partition("x")
        return int(rows), int(context)

    add = arguments.add_argument
    add("--backend", default=backends.AUTO)
    add("--shape", type=words(SHAPES), default=["qwen3-0.6b"], help=", ".join(SHAPES))
    add("--formats", type=words(FORMATS), default=["bf16"])
    add(
        "--ways", type=each(Way.parse), default=[Way.parse("auto"), Way.parse("off")], help="auto, full, off/in-turn, …"
    )
    jobs = [Job(name) for name in ("decode", "idle", "prefill", "mixed")]
    jobs_help = f"{', '.join(JOBS)}; mixed:auto+full: only with these ways; empty: only check outputs"
    add("--jobs", type=each(Job.parse), default=jobs, help=jobs_help)
    add("--peers", type=words(PEER_FORMATS), default=[], help=", ".join(PEER_FORMATS))
    add("--cells", type=each(cell), default=CELLS, help="rows and context of decode steps: 1x128,64x1024")
    add("--steps", type=int, default=32, help="timed steps in a round")
    add("--rounds", type=int, default=6, help="measurements of each way")
    add("--lengths", type=each(int), default=[128, 513, 2048, 8000], help="of the prompts of prefill")
    add("--longest", type=int, default=16_000, help="longest prompt of sweep")
    add("--requests", type=int, default=256, help="of mixed and even")
    add("--most", type=int, default=1024, help="tokens in and out of each request of mixed and even")
    add("--runs", type=int, default=2, help="of mixed and even")
    add("--temperature", type=float, default=0.6, help="of mixed and even")
    add("--step-tokens", type=int, default=8192)
    add("--cache-dtype", choices=get_args(CacheDtype), default="auto")
    add("--compiler", choices=get_args(Compiler), default="inductor", help="for ways with graphs split")
    add("--page-size", type=int, default=16)
    add("--check-layers", type=int, default=4, help="layers of the model whose outputs are checked; 0: all")
    add("--unchecked", action="store_true", help="do not check outputs, and save no result")
    add("--canary", type=each(int), default=[1, 16, 64, 256], help="rows of the canary model")
    add("--folder", help="folder for weights, with room for the largest model; default: a temporary folder")
    add("--save", default="cuda", help="name of the file of results; empty: none")
    options = arguments.parse_args()
    if unknown := {way for job in options.jobs for way in job.ways} - {way.name for way in options.ways}:
        arguments.error(f"--jobs: {', '.join(sorted(unknown))}: not among --ways")
    return options


if __name__ == "__main__":
    main()
