"""A model on the device of this machine: the speed of its steps, beside llama.cpp, transformers, or localllm itself.

`python scripts/bench/models.py --shape qwen3-0.6b --formats bf16,int4 --jobs decode:1x128,decode:16x32,prefill:512`
measures random weights; `--shape guide` the built-in model. Jobs: decode:ROWSxCONTEXT, prefill:CONTEXT, hit:CONTEXT
(a prefill with a cached prefix), requests:ROWSxTOKENS (as in nano-vllm's benchmark), profile:ROWSxCONTEXT (the time
of each kernel); decode:64x128@8 uses 8 adapters. `ours` is the time in ms of a step, or until the first token, or until
the last request ends.

`--ways` compares settings, each in a process of its own: `--ways auto graphs=off`. A way has fields of LoadOptions and
environment variables, with commas between them: `--ways LOCALLLM_CUDA_LIBRARY=build/b.so graphs=off,streams=one`. Each
is compared with the fastest peer, or with the first way if there is no peer. All programs take turns (A B B A); results
are medians. The formats q8_0 and q4_k_m are GGUF files, which localllm computes with llama.cpp. `bound_share` is the
share of the read bound: the weights and the cache that a step reads, at the read bandwidth measured in every round.

On a GPU the program first compares log-probabilities with the references (outputs.py). If one is wrong, it measures
nothing. `--backend cpu --shape tiny` is a test of the program.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import gguf_file
from programs import Job, Program
from rows import Row, among, parser, row, save, words
from run_localllm import WARMUP, open_files, random_requests
from shapes import SHAPES

from localllm import backends
from localllm.backends.machine import cores
from localllm.engine.files.model_config import parse_config
from localllm.engine.files.model_files import ModelFiles
from localllm.engine.files.quantization import Quant
from localllm.engine.options import LoadOptions
from localllm.engine.runner import page_bytes

PAGE = 64  # positions
SLOTS = LoadOptions().adapter_slots
TITLES = {"guide": "guide", **{name: shape.name for name, shape in SHAPES.items()}}
OPTIONS = {field.name for field in fields(LoadOptions)}


class Format(NamedTuple):
    """A weight format, and the GGUF recipes with about as many bits."""

    quant: Quant = "none"
    peers: tuple[str, ...] = ()
    is_gguf: bool = False  # localllm reads the GGUF file too


FORMATS = {
    "bf16": Format("none", ("bf16",)),
    "int8": Format("int8", ("q8_0",)),
    "int4": Format("int4", ("q4_0", "q4_k_m")),
    "fp8": Format("fp8"),
    "fp8_w8a8": Format("fp8_w8a8"),
    "q8_0": Format(peers=("q8_0",), is_gguf=True),
    "q4_k_m": Format(peers=("q4_k_m",), is_gguf=True),
}
Arguments = tuple[str, str, Mapping[str, object]]  # the arguments of Program


class Way(NamedTuple):
    """One way to run localllm."""

    label: str
    options: dict[str, Any]  # fields of LoadOptions
    environment: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> Way:
        way = cls(text, {}, {})
        for word in words(text.removeprefix("auto")):
            name, value = word.split("=", 1)
            if name in OPTIONS:
                way.options[name] = int(value) if value.isdigit() else value
            elif name.isupper():
                way.environment[name] = value
            else:
                raise argparse.ArgumentTypeError(f"{name}: no option of a load")
        return way


@dataclass(frozen=True)
class Model:
    """A shape in one format. `folder` is for its files."""

    shape: str
    fmt: str
    folder: Path

    @property
    def title(self) -> str:
        return f"{TITLES[self.shape]}, {self.fmt}"

    @property
    def is_gguf(self) -> bool:
        return FORMATS[self.fmt].is_gguf

    @property
    def source(self) -> str:
        """The setting `model` of run_localllm.py."""
        return str(self.gguf(self.fmt)) if self.is_gguf else self.shape

    def gguf(self, recipe: str) -> Path:
        """The GGUF file, which is written at the first call."""
        file = self.folder / f"{recipe}.gguf"
        gguf_file.write(SHAPES[self.shape], recipe, file)
        return file


def main() -> None:
    options = _options()
    for shape in options.shape:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            for fmt in options.formats:
                save(options.save, measure(Model(shape, fmt, Path(folder)), options))


def measure(model: Model, options: argparse.Namespace) -> Iterator[Row]:
    files = open_files(model.source, model.folder)
    choice = backends.choose(options.backend, files)
    is_gpu = not choice.info.main_memory
    settings = {"model": model.source, "folder": str(model.folder), "backend": choice.backend.name}
    load = load_options(model, files, is_gpu, options)
    with ExitStack() as stack:

        def opened(*arguments: Any) -> Program:
            program = Program(*arguments)
            stack.callback(program.close)
            return program

        if layers := 4 * is_gpu if options.check_layers is None else options.check_layers:
            yield from check(model, settings, layers)
        settings["adapters"] = options.adapters
        ways = []
        for way in options.ways:
            more = {"options": load | way.options}
            ways.append(opened(way.label, "run_localllm.py", settings | more, way.environment))
            yield _loading(f"{model.title}, load, {way.label}", ways[-1])
        peers = [opened(*arguments) for name in options.peers for arguments in PEERS[name](model, is_gpu, options)]
        for job in options.jobs:
            yield from figures(f"{model.title}, {job}", job, ways, peers, options.rounds)


def check(model: Model, settings: Mapping[str, object], layers: int) -> Iterator[Row]:
    """Compare log-probabilities with the references, in a process that leaves no memory allocated."""
    if model.shape not in SHAPES or model.is_gguf:
        return
    program = Program("outputs", "outputs.py", {**settings, "quant": FORMATS[model.fmt].quant, "layers": layers})
    program.close()
    facts = {"device": program.hello["device"], "most": program.hello["largest"], "layers": layers}
    name = f"{model.title}, log-probabilities against float32 references"
    yield row(name, program.hello["mean"], "millinats", compared=program.hello["compared"], **facts)


def load_options(model: Model, files: ModelFiles, is_gpu: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Fields of LoadOptions: with the limits that the largest job needs, unless `fit`."""
    load: dict[str, Any] = {"quant": FORMATS[model.fmt].quant, "adapter_slots": max(SLOTS, options.adapters)}
    if not is_gpu:
        load["threads"] = options.threads
    if options.fit:
        return load
    lengths = [_lengths(job) for job in options.jobs]
    load["context"] = context = max(map(max, lengths))
    load["max_rows"] = rows = max(map(len, lengths))
    # GGUF: with cache_layout=rows, each row has a cache for a context.
    needed = [[context] * rows] if model.is_gguf else lengths
    pages = max(sum(length // PAGE + 2 for length in each) for each in needed)
    config = parse_config(SHAPES[model.shape].config()) if model.is_gguf else files.config
    parts, heads, dim = config.cache_shape
    itemsize = 2 if is_gpu else 4
    page = page_bytes(PAGE, heads, dim, len(config.attention_layers), itemsize, parts)
    return load | {"cache_bytes": max(pages * page + 2 * rows * config.state_bytes, 4 * rows * config.state_bytes)}


def _lengths(job: Job) -> list[int]:
    """The positions of each row."""
    if job.kind == "requests":
        return [sum(both) + 1 for both in zip(*random_requests(job.rows, job.context), strict=True)]
    lead = job.rows * job.context // 512  # 512: the smallest maximum of tokens in a step
    return [job.context + lead + job.steps + 3 * WARMUP] * job.rows


def _llamacpp(model: Model, is_gpu: bool, options: argparse.Namespace) -> Iterator[Arguments]:
    for recipe in FORMATS[model.fmt].peers if model.shape in SHAPES else ():
        settings = {"file": str(model.gguf(recipe)), "threads": options.threads, "gpu": is_gpu}
        yield f"llama.cpp {recipe}", "run_llamacpp.py", settings


def _transformers(model: Model, is_gpu: bool, options: argparse.Namespace) -> Iterator[Arguments]:
    settings = {"model": model.source, "folder": str(model.folder), "threads": options.threads}
    devices = {"bfloat16": "cuda"} if is_gpu else {"bfloat16": "cpu", "float32": "cpu"}
    for dtype, device in devices.items() if model.fmt == "bf16" else ():
        yield f"transformers, {dtype}", "run_transformers.py", settings | {"dtype": dtype, "device": device}


PEERS = {"llama.cpp": _llamacpp, "transformers": _transformers}
MODULES = {"llama.cpp": "llama_cpp", "transformers": "transformers"}


def _loading(name: str, way: Program) -> Row:
    hello = way.hello
    gib = {key: round(hello[f"{key}_bytes"] / 2**30, 2) for key in ("weight", "cache", "peak")}
    facts = {key: hello[key] for key in ("dtype", "context", "adapter_slots", "graph_seconds", "warnings")}
    return row(name, hello["load_seconds"], "s", device=hello["device"], gib=gib, **facts)


def figures(title: str, job: Job, ways: list[Program], peers: list[Program], rounds: int) -> Iterator[Row]:
    """A row for each way, compared with the fastest peer, or with the first way if there is no peer."""
    peers = peers if job.kind in ("decode", "prefill") and not job.adapters else []
    times, bandwidth = _alternate(job, ways + peers, rounds)
    for way in ways:
        time = times[way.label]
        facts: dict[str, object] = {"rounds": rounds, "tokens_per_second": _tokens(job) / time}
        rival = min((peer.label for peer in peers or ways[:1]), key=times.__getitem__)
        if rival != way.label:
            facts |= {"peer": 1e3 * times[rival], "ratio": times[rival] / time, "against": rival}
        if job.kind == "decode" and bandwidth:
            facts["bound_share"] = _bound(job, way.hello) / bandwidth / time
        yield row(f"{title}, {way.label}", 1e3 * time, "ms", device=way.hello["device"], **facts)


def _alternate(job: Job, programs: list[Program], rounds: int) -> tuple[dict[str, float], float]:
    """Medians over the rounds, after one that warms up: seconds by label, of a step or of the job; and the read
    bandwidth in bytes per second, or 0."""
    seconds: dict[str, list[float]] = {program.label: [] for program in programs}
    bandwidths = []
    for number in range(rounds + 1):
        for program in programs[:: 1 if number % 2 else -1]:
            seconds[program.label].append(program.do(job)["seconds"] / max(1, job.steps))
        bandwidths.append(programs[0].do(Job("read"))["bandwidth"])
    return {label: statistics.median(each[1:]) for label, each in seconds.items()}, statistics.median(bandwidths[1:])


def _tokens(job: Job) -> int:
    """The tokens of the timed step, prompts or requests."""
    if job.kind == "requests":
        return sum(random_requests(job.rows, job.context)[1])
    return job.rows * (job.context if job.kind == "prefill" else 1)


def _bound(job: Job, hello: Mapping[str, Any]) -> float:
    """The bytes that a decode step must read: weights, and the keys and values of all rows."""
    mean_context = job.context + WARMUP + job.steps / 2
    return float(hello["step_bytes"] + job.rows * mean_context * hello["position_bytes"])


def _options() -> argparse.Namespace:
    arguments = parser(__doc__, "models")
    add = arguments.add_argument
    add("--shape", type=among(*TITLES), default=["qwen3-0.6b"], help=", ".join(TITLES))
    add("--formats", type=among(*FORMATS), default=["bf16", "int8", "int4"], help=", ".join(FORMATS))
    jobs = "decode:1x128,decode:16x32,prefill:128,prefill:512"
    add("--jobs", type=lambda text: [Job.parse(word) for word in words(text)], default=jobs, help=f"default: {jobs}")
    add("--ways", type=Way.parse, nargs="+", default=[Way("auto", {}, {})])
    installed = [name for name, module in MODULES.items() if find_spec(module)]
    add("--peers", type=among(*PEERS), default=installed, help=f"default: the installed ones of {', '.join(PEERS)}")
    add("--backend", default=backends.AUTO)
    add("--rounds", type=int, default=5)
    add("--steps", type=int, default=32, help="timed steps of a decode job")
    add("--threads", type=int, default=cores(), help="default: physical cores")
    add("--fit", action="store_true", help="default limits of context and cache instead of those that the jobs need")
    add("--check-layers", type=int, help="number of layers whose outputs are checked; 0: none; default: 4 on a GPU")
    add("--folder", help="folder for temporary files")
    options = arguments.parse_args()
    steps = {"decode": options.steps, "profile": options.steps}
    options.jobs = [replace(job, steps=steps.get(job.kind, 0)) for job in options.jobs]
    options.adapters = max(job.adapters for job in options.jobs)
    return options


if __name__ == "__main__":
    main()
