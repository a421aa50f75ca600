"""Shapes on a GPU, through the engine as the daemon drives it: steps, prompts, throughput, and what the GPU waits.

`python scripts/bench/cuda_models.py --shape qwen3-0.6b,llama-8b --ways full,off`. Weights are random, made first;
outputs are checked first, and nothing is measured where one is wrong. `--ways` names ways to run the model, which take
turns round by round: what `graphs` of a runner may be, with `/in-turn` for one that does not plan ahead. All are
compared with transformers in eager mode (`--peers transformers`), and with the last of them. The device's ceilings are
measured before and after. Any backend will do: `--backend cpu --shape tiny` shows that everything runs.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import outputs
import torch
from jobs import JOBS, Ceilings, Peer, Setting, at_random
from rows import Row, row, save
from shapes import SHAPES, Shape
from stepping import Stepped
from weights import stand_in

from localllm import backends
from localllm.backends.pytorch.graphs.runner import GraphRunner
from localllm.engine.modelfiles import ModelFiles
from localllm.engine.options import CacheDtype, Compiler, Graphs, LoadOptions
from localllm.engine.request import Sampling
from localllm.engine.runner import Backend, Unavailable, page_bytes

if TYPE_CHECKING:
    from localllm.kernels.benchmark.gpu_peaks import Peaks

FORMATS: Mapping[str, str] = {"bf16": "none", "int8": "int8", "int4": "int4", "fp8": "fp8"}
PEERS = ("transformers",)
CELLS = [(rows, context) for context in (128, 1024, 8192) for rows in (1, 8, 16, 64) if rows * context <= 2**17]
DRIFT = 0.02  # of a ceiling, which is then said
STARTED = time.perf_counter()
SPARE = 96  # positions beyond those that a job names: steps before and after the timed ones

Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a model."""

    name: str
    graphs: Graphs
    overlap: bool  # a step is planned and started before the answers of the one before are read

    @classmethod
    def parse(cls, text: str) -> Way:
        graphs, _, rest = text.partition("/")
        if graphs not in get_args(Graphs) or rest not in ("", "in-turn"):
            raise argparse.ArgumentTypeError(f"{text}: one of {', '.join(get_args(Graphs))}, maybe with /in-turn")
        return cls(text, graphs, overlap=not rest)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Job:
    """One of JOBS, and the ways that it is done with; none: all."""

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
    options, failed, exact = _options(), list[str](), set[Graphs]()
    for name in options.shape:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            files = stand_in(SHAPES[name], Path(folder))
            rows = (one for fmt in options.formats for one in measure(options, name, fmt, files, exact, failed))
            save("" if options.unchecked else options.save, rows, part=True)
    if failed:
        sys.exit(f"broke off: {', '.join(failed)}")


def measure(
    options: argparse.Namespace, name: str, fmt: str, files: ModelFiles, exact: set[Graphs], failed: list[str]
) -> Iterator[Row]:
    """Everything that was asked for of a shape, in one format; jobs that broke off are added to `failed`. Models whose
    tokens are known are asked only of ways that are not yet known to be `exact`."""
    shape, choice = SHAPES[name], backends.choose(options.backend, files)
    gpu = "" if choice.info.main_memory else choice.info.name
    held = fmt if options.cache_dtype == "auto" else f"{fmt}, {options.cache_dtype} cache"

    def told(name: str, ours: float, unit: str, **more: Any) -> Row:
        return row(f"{shape.name}, {held}, {name}", ours, unit, device=gpu, **more)

    budget = LoadOptions(
        quant=FORMATS[fmt],  # type: ignore[arg-type]
        cache_dtype=options.cache_dtype,
        compiler=options.compiler,
        max_step_tokens=options.step_tokens,
        page_size=options.page_size,
    )
    checks = outputs.Checks(choice.backend, shape, files, fmt, budget, options.check_layers)
    for graphs in dict.fromkeys(() if options.unchecked else (way.graphs for way in options.ways)):
        yield _near(checks, graphs, told)
        if graphs not in exact:
            yield _exact(checks, graphs, options.canary, told)
            exact.add(graphs)
    if not options.jobs:
        return
    before = _peaks() if gpu else None
    if before is not None:
        yield told("ceiling, read", before.read / 1e9, "GB/s", rounds=before.rounds)
        yield told("ceiling, copy", before.copy / 1e9, "GB/s", rounds=before.rounds)
        yield told("ceiling, bf16 product of 8192³", before.multiply / 1e12, "TFLOP/s", rounds=before.rounds)
    ceilings = Ceilings() if before is None else Ceilings(before.read, before.multiply)
    with ExitStack() as stack:
        ways = []
        for way in options.ways:
            jobs = {job.name for job in options.jobs if job.does(way.name)}
            if not jobs:
                continue
            room = replace(budget, **_room(options, jobs, shape, gpu))
            stepped, figure = _opened(choice.backend, files, room, way, told)
            stack.callback(stepped.close)
            ways.append(stepped)
            yield figure
        peer = _peer(options, fmt, shape, files, gpu)
        setting = replace(_asked(options, shape, told), ways=ways, peer=peer, ceilings=ceilings, has_trace=bool(gpu))
        for job in options.jobs:
            try:
                chosen = [way for way in ways if job.does(way.label)]
                yield from JOBS[job.name](replace(setting, ways=chosen))
                _say(f"{job.name}: done")
            except Exception:  # the other jobs are worth their time all the same
                traceback.print_exc()
                failed.append(job.name)
    if before is not None:
        changes = _peaks().changes(before)
        for ceiling, change in changes.items():
            if abs(change) > DRIFT:
                _say(f"the ceiling of {ceiling} has changed by {change:+.1%}: figures compared with it do not count")
        each = {ceiling: round(100 * change, 2) for ceiling, change in changes.items()}
        yield told("ceilings, largest change meanwhile", 100 * max(map(abs, changes.values())), "%", rounds=2, **each)


def _asked(options: argparse.Namespace, shape: Shape, told: Callable[..., Row]) -> Setting:
    return Setting(
        shape,
        told,
        rounds=options.rounds,
        cells=options.cells,
        steps=options.steps,
        lengths=options.lengths,
        longest=options.longest,
        requests=options.requests,
        most=options.most,
        runs=options.runs,
        sampling=Sampling(temperature=options.temperature),
    )


def _near(checks: outputs.Checks, graphs: Graphs, told: Callable[..., Row]) -> Row:
    """Raises outputs.WrongOutput."""
    found = checks.log_probabilities(graphs)
    name, most = f"log-probabilities against float32 references, graphs {graphs}", round(1e3 * found.most, 2)
    _say(f"graphs {graphs}: log-probabilities checked")
    return told(name, 1e3 * found.mean, "millinats", most=most, compared=found.compared, layers=checks.layers)


def _exact(checks: outputs.Checks, graphs: Graphs, rows: list[int], told: Callable[..., Row]) -> Row:
    """Raises outputs.WrongOutput."""
    right = checks.canary(graphs, rows) + checks.guide(graphs)
    _say(f"graphs {graphs}: the canary model and guide checked")
    return told(f"tokens of the canary model and guide, all right, graphs {graphs}", right, "tokens")


def _say(what: str) -> None:
    """How far it has come, with the time since it started."""
    print(f"{time.perf_counter() - STARTED:6.1f} s  {what}", file=sys.stderr, flush=True)


def _peaks() -> Peaks:
    from localllm.kernels.benchmark.gpu_peaks import peaks

    return peaks()


def _opened(
    backend: Backend, files: ModelFiles, budget: LoadOptions, way: Way, told: Callable[..., Row]
) -> tuple[Stepped, Row]:
    """Ready to be timed, and what opening it took: seconds, also of recording, and memory beyond weights and cache."""
    free, start = _free(backend), time.perf_counter()
    runner = backend.open(files, replace(budget, graphs=way.graphs))
    seconds, spec = time.perf_counter() - start, runner.spec
    beyond = free - _free(backend) - spec.weight_bytes - spec.cache_bytes
    more = {"beyond_gib": round(beyond / 2**30, 3)} if free else {}
    if isinstance(runner, GraphRunner):
        more["recorded_in"] = round(runner.capture_seconds, 2)
    _say(f"{way.name}: open, {spec}")
    stepped = Stepped(way.name, runner, overlap=way.overlap)
    _say(f"{way.name}: its cache filled")
    return stepped, told(f"open, {way.name}", seconds, "s", rounds=1, **more)


def _free(backend: Backend) -> int:
    """Bytes of the GPU's memory that nobody holds; 0 where there is no GPU."""
    if isinstance(info := backend.probe(), Unavailable) or info.main_memory:
        return 0
    gc.collect()  # runners that were closed
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def _room(options: argparse.Namespace, jobs: set[str], shape: Shape, gpu: str) -> dict[str, Any]:
    """What the largest of the jobs needs."""
    page, together = options.page_size, list[list[int]]()  # tokens of each of the requests of one of them
    if "prefill" in jobs:
        together += [[length] for length in options.lengths]
    if "sweep" in jobs:
        together += [[options.longest]]
    if jobs & {"decode", "idle"}:  # the first row decodes while the last ones' prompts are passed over
        together += [
            [context + 3 * options.steps + rows * context // options.step_tokens] * rows
            for rows, context in options.cells
        ]
    if "mixed" in jobs:
        prompts, counts = at_random(options.requests, options.most)
        together += [[len(prompt) + count for prompt, count in zip(prompts, counts, strict=True)]]
    if "even" in jobs:
        together += [[2 * options.most] * options.requests]
    pages = max(sum((tokens + SPARE) // page + 1 for tokens in each) for each in together)
    return {
        "context": min(shape.positions, max(map(max, together)) + SPARE),
        "max_rows": max(map(len, together)),
        "cache_bytes": pages * page_bytes(page, shape.kv_heads, shape.head_dim, shape.layers, 2 if gpu else 4),
    }


def _peer(options: argparse.Namespace, fmt: str, shape: Shape, files: ModelFiles, gpu: str) -> Peer | None:
    if "transformers" not in options.peers or fmt != "bf16":
        return None
    from transformers_steps import Transformers

    try:
        return Transformers(shape, files, "cuda" if gpu else "cpu")
    except Exception:  # another release of it, say: then there is nothing to compare with
        traceback.print_exc()
        _say("transformers does not run here: not measured")
        return None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def words(known: Mapping[str, object] | tuple[str, ...]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            chosen = [word for word in text.split(",") if word]
            if unknown := set(chosen) - set(known):
                raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not among {', '.join(known)}")
            return chosen

        return parse

    def each(one: Callable[[str], Parsed]) -> Callable[[str], list[Parsed]]:
        return lambda text: [one(word) for word in text.split(",") if word]

    def cell(text: str) -> tuple[int, int]:
        rows, _, context = text.partition("x")
        return int(rows), int(context)

    add = parser.add_argument
    add("--backend", default=backends.AUTO)
    add("--shape", type=words(SHAPES), default=["qwen3-0.6b"], help=", ".join(SHAPES))
    add("--formats", type=words(FORMATS), default=["bf16"])
    add(
        "--ways", type=each(Way.parse), default=[Way.parse("auto"), Way.parse("off")], help="auto, full, off/in-turn, …"
    )
    some = [Job(name) for name in ("decode", "idle", "prefill", "mixed")]
    told = f"{', '.join(JOBS)}; mixed:auto+full of these ways alone; empty: only outputs are checked"
    add("--jobs", type=each(Job.parse), default=some, help=told)
    add("--peers", type=words(PEERS), default=[], help=", ".join(PEERS))
    add("--cells", type=each(cell), default=CELLS, help="rows and context of steps: 1x128,64x1024")
    add("--steps", type=int, default=32, help="of a turn")
    add("--rounds", type=int, default=6, help="turns of each")
    add("--lengths", type=each(int), default=[128, 513, 2048, 8000], help="of prompts")
    add("--longest", type=int, default=16_000, help="of the prompts of a sweep")
    add("--requests", type=int, default=256, help="of mixed and even")
    add("--most", type=int, default=1024, help="tokens in and out of each of these")
    add("--runs", type=int, default=2, help="of mixed and even")
    add("--temperature", type=float, default=0.6, help="of mixed and even")
    add("--step-tokens", type=int, default=8192)
    add("--cache-dtype", choices=get_args(CacheDtype), default="auto")
    add("--compiler", choices=get_args(Compiler), default="inductor", help="of ways with graphs split")
    add("--page-size", type=int, default=16)
    add("--check-layers", type=int, default=4, help="of the model whose outputs are checked; 0: all")
    add("--unchecked", action="store_true", help="for trying things: outputs may be wrong, and no figure is kept")
    add("--canary", type=each(int), default=[1, 16, 64, 256], help="rows of the canary model")
    add("--folder", help="where weights are written, about as many bytes as the largest has; a temporary one")
    add("--save", default="cuda", help="name of the file of results; empty: none")
    options = parser.parse_args()
    if unknown := {way for job in options.jobs for way in job.ways} - {way.name for way in options.ways}:
        parser.error(f"--jobs: {', '.join(sorted(unknown))}: not among --ways")
    return options


if __name__ == "__main__":
    main()
