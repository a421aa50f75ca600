"""One shape on the CPU of this machine, beside llama.cpp and transformers with the same random weights.

`python scripts/bench/cpu.py --help`. llama.cpp is the library of the installed llama-cpp-python; `--site` names a
folder with that package and gguf if they are not in this environment. Every program uses all physical cores. A short
trial chooses the fastest settings of a peer: flash attention on or off, and for int4 both formats. Then localllm and
the peer alternate (A B B A); results are medians over the pairs. Without an installed peer localllm is measured alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import weights
from programs import Answer, Comparison, Job, Program, compare, rate
from rows import Row, parser, row, save
from shapes import SHAPES, Shape

from localllm.backends.machine import cores

JOBS: Mapping[str, Job] = {
    "decode": Job("decode", rows=1, context=128, tokens=32),
    "decode16": Job("decode", rows=16, context=32, tokens=8),
    "prefill128": Job("prefill", context=128),
    "prefill512": Job("prefill", context=512),
    "prefill1024": Job("prefill", context=1024),
}
ROWS = 16  # localllm allocates KV memory for these rows and positions
CONTEXT = 1280

# Format of localllm -> formats of llama.cpp with as many bits.
FORMATS: Mapping[str, tuple[str, ...]] = {"bf16": ("bf16",), "int8": ("q8_0",), "int4": ("q4_0", "q4_k_m")}

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Peer:
    """Another program, with one choice of its settings."""

    label: str
    script: str
    settings: Mapping[str, object]
    options: Mapping[str, object] = field(default_factory=dict)  # sent with each job


def main() -> None:
    options = _options()
    folder = Path(options.folder) / options.shape
    shape = SHAPES[options.shape]
    weights.write(shape, folder)
    if options.site:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [options.site, os.environ.get("PYTHONPATH")]))
    save(options.save, (figure for fmt in options.formats for figure in measure(shape, folder, fmt, options)))


def measure(shape: Shape, folder: Path, fmt: str, options: argparse.Namespace) -> Iterator[Row]:
    """Load times and all jobs in one format."""
    threads = options.threads or cores()
    packed = folder / "packed"
    shutil.rmtree(packed, ignore_errors=True)
    caches = fmt != "bf16" and not options.load_once  # the second load reads packed weights, as in the daemon
    settings = {
        "folder": str(folder),
        "threads": threads,
        "quant": "none" if fmt == "bf16" else fmt,
        "packed": str(packed) if caches else None,
        "rows": ROWS,
        "context": CONTEXT,
    }
    if caches:
        with Program("run_localllm.py", settings) as first:
            yield from _loading(f"{shape.name}, {fmt}, first load", first.hello, threads)
    with Program("run_localllm.py", settings) as localllm:
        yield from _loading(f"{shape.name}, {fmt}, load", localllm.hello, threads)
        yield from _jobs(localllm, shape, folder, fmt, options)
    shutil.rmtree(packed, ignore_errors=True)


def _jobs(localllm: Program, shape: Shape, folder: Path, fmt: str, options: argparse.Namespace) -> Iterator[Row]:
    """Each job beside every kind of peer; a job without a peer alone."""
    threads = options.threads or cores()
    alone = set(options.jobs)
    for peers in _peers(shape, folder, fmt, threads, options):
        for name in options.jobs:
            job = JOBS[name]
            if job.kind == "decode" and peers[0].script == "run_transformers.py":
                continue
            peer, result = compare_with_fastest(localllm, peers, job, options.pairs)
            alone.discard(name)
            yield _figure(shape, fmt, job, peer, result, localllm.hello, threads)
    for name in options.jobs:
        if name in alone:
            result = compare(localllm, None, JOBS[name], {}, options.pairs)
            yield _figure(shape, fmt, JOBS[name], None, result, localllm.hello, threads)


def _loading(name: str, hello: Answer, threads: int) -> Iterator[Row]:
    yield row(name, hello["load_seconds"], "s", threads=threads)
    over = round((hello["peak"] - hello["weight_bytes"]) / 2**30, 2)
    yield row(f"{name}, peak memory", hello["peak"] / 2**30, "GiB", beyond_weights=over, threads=threads)


def compare_with_fastest(localllm: Program, peers: list[Peer], job: Job, pairs: int) -> tuple[Peer, Comparison]:
    """Compare with the fastest of a peer's settings."""
    with ExitStack() as stack:
        programs: dict[str, Program] = {}
        for peer in peers:
            key = repr(peer.settings)
            if key not in programs:
                programs[key] = stack.enter_context(Program(peer.script, peer.settings))
        fastest = peers[0]
        if len(peers) > 1:
            fastest = max(peers, key=lambda peer: _trial(programs[repr(peer.settings)], job, peer))
        return fastest, compare(localllm, programs[repr(fastest.settings)], job, fastest.options, pairs)


def _trial(program: Program, job: Job, peer: Peer) -> float:
    """The rate after a warm-up."""
    rate(program, job, peer.options)
    return rate(program, job, peer.options)


def _figure(
    shape: Shape, fmt: str, job: Job, peer: Peer | None, result: Comparison, hello: Answer, threads: int
) -> Row:
    title = f"prompt of {job.context}"
    share = None
    if job.kind == "decode":
        rows = "1 row" if job.rows == 1 else f"{job.rows} rows"
        title = f"decode, {rows} after {job.context} tokens each"
        share = result.share(hello["read_per_step"] / job.rows)
    compared: dict[str, object] = {"against": None}
    if peer is not None:
        compared = {"peer": round(result.peer, 2), "ratio": result.ratio, "against": peer.label}
    return row(
        f"{shape.name}, {fmt}, {title}",
        result.localllm,
        "tokens/s",
        bound_share=share,
        read_gb=round(result.read / 1e9, 1),
        pairs=len(result.pairs),
        dtype=hello["dtype"],
        threads=threads,
        **compared,  # type: ignore[arg-type]
    )


def _peers(shape: Shape, folder: Path, fmt: str, threads: int, options: argparse.Namespace) -> Iterator[list[Peer]]:
    """For each installed peer: its settings to try."""
    if "llama.cpp" in options.peers:
        peers = []
        for recipe in FORMATS[fmt]:
            file = folder / f"{recipe}.gguf"
            if not file.exists():
                subprocess.run(
                    [sys.executable, str(HERE / "write_gguf.py"), options.shape, recipe, str(file)], check=True
                )
            settings = {"file": str(file), "threads": threads, "mmap": options.mmap}
            for flash in {"on": [True], "off": [False], "both": [True, False]}[options.flash]:
                label = f"llama.cpp {recipe}, flash attention {'on' if flash else 'off'}"
                peers.append(Peer(label, "run_llamacpp.py", settings, {"flash": flash}))
        yield peers
    if "transformers" in options.peers and fmt == "bf16":
        yield [
            Peer(
                f"transformers, {dtype}",
                "run_transformers.py",
                {"folder": str(folder), "threads": threads, "dtype": dtype},
            )
            for dtype in ("bfloat16", "float32")
        ]


def _options() -> argparse.Namespace:
    arguments = parser(__doc__)

    def words(allowed: Mapping[str, object] | tuple[str, ...]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            chosen = text.split(",")
            if unknown := set(chosen) - set(allowed):
                raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not among {', '.join(allowed)}")
            return chosen

        return parse

    peers = ("llama.cpp", "transformers")
    arguments.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    arguments.add_argument("--folder", default="build/bench", help="folder for the models")
    arguments.add_argument("--site", help="a folder of packages for the peers")
    arguments.add_argument("--formats", type=words(FORMATS), default=list(FORMATS))
    arguments.add_argument("--jobs", type=words(JOBS), default=["decode", "decode16", "prefill128", "prefill512"])
    arguments.add_argument("--peers", type=words(peers), default=None, help="default: the installed peers")
    arguments.add_argument("--pairs", type=int, default=5)
    arguments.add_argument("--threads", type=int, help="default: physical cores")
    arguments.add_argument("--mmap", action="store_true", help="llama.cpp maps its files instead of reading them")
    arguments.add_argument(
        "--load-once", action="store_true", help="do not cache quantised weights and load them again"
    )
    arguments.add_argument("--flash", choices=("on", "off", "both"), default="both", help="llama.cpp's flash attention")
    arguments.add_argument("--save", default="cpu", help="name of the file of results")
    options = arguments.parse_args()
    if options.peers is None:
        installed = {
            "llama.cpp": bool(options.site or find_spec("llama_cpp")),
            "transformers": find_spec("transformers"),
        }
        options.peers = [name for name in peers if installed[name]]
        for name in sorted(set(peers) - set(options.peers)):
            print(f"{name} is not installed: not measured", file=sys.stderr)
    return options


if __name__ == "__main__":
    main()
