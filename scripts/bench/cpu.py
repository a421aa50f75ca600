"""One shape on this machine's CPU, beside llama.cpp and transformers: the same random weights, step by step in turns.

`python scripts/bench/cpu.py --help`. llama.cpp is whatever library the installed llama-cpp-python has; `--site` names
a folder with that package and gguf if they are not in this environment. Each side has all physical cores. A peer is
first tried in its documented settings (flash attention on and off, and for int4 both formats), and the best one is
raced: every job A B B A, medians over the pairs. Peers that are not installed are left out, and said to be; what
nobody races is measured alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import weights
from programs import Answer, Contestant, Duel, Job, duel, rate
from rows import Row, row, save
from shapes import SHAPES, Shape

from localllm.backends.cpu.machine import cores

JOBS: Mapping[str, Job] = {
    "decode": Job("decode", rows=1, context=128, tokens=32),
    "decode16": Job("decode", rows=16, context=32, tokens=8),
    "prefill128": Job("prefill", context=128),
    "prefill512": Job("prefill", context=512),
    "prefill1024": Job("prefill", context=1024),
}
ROWS, CONTEXT = 16, 1280  # what the contestants make room for

# Our format: what llama.cpp calls those of its own that are as wide.
FORMATS: Mapping[str, tuple[str, ...]] = {"bf16": ("bf16",), "int8": ("q8_0",), "int4": ("q4_0", "q4_k_m")}

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Side:
    """A peer in one of its settings."""

    label: str
    program: str
    settings: Mapping[str, object]
    how: Mapping[str, object] = field(default_factory=dict)  # said with each job


def main() -> None:
    options = _options()
    folder = Path(options.folder) / options.shape
    shape = SHAPES[options.shape]
    weights.write(shape, folder)
    if options.site:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [options.site, os.environ.get("PYTHONPATH")]))
    save(options.save, (figure for fmt in options.formats for figure in measure(shape, folder, fmt, options)))


def measure(shape: Shape, folder: Path, fmt: str, options: argparse.Namespace) -> Iterator[Row]:
    """Loading and all jobs in one format."""
    threads = options.threads or cores()
    packed = folder / "packed"
    shutil.rmtree(packed, ignore_errors=True)
    keeps = fmt != "bf16" and not options.load_once  # for the next load, as the daemon does
    ours = {
        "folder": str(folder),
        "threads": threads,
        "quant": "none" if fmt == "bf16" else fmt,
        "packed": str(packed) if keeps else None,
        "rows": ROWS,
        "context": CONTEXT,
    }
    if keeps:
        with Contestant("run_localllm.py", ours) as first:
            yield from _loading(f"{shape.name}, {fmt}, first load", first.hello, threads)
    with Contestant("run_localllm.py", ours) as us:
        yield from _loading(f"{shape.name}, {fmt}, load", us.hello, threads)
        raced = set()
        for sides in _peers(shape, folder, fmt, threads, options):
            for name in options.jobs:
                job = JOBS[name]
                if job.kind == "decode" and sides[0].program == "run_transformers.py":
                    continue
                side, result = race(us, sides, job, options.pairs)
                raced.add(name)
                yield _figure(shape, fmt, job, side, result, us.hello, threads)
        for name in options.jobs:
            if name not in raced:
                job = JOBS[name]
                yield _figure(shape, fmt, job, None, duel(us, None, job, {}, options.pairs), us.hello, threads)
    shutil.rmtree(packed, ignore_errors=True)


def _loading(name: str, hello: Answer, threads: int) -> Iterator[Row]:
    yield row(name, hello["load_seconds"], "s", threads=threads)
    over = round((hello["peak"] - hello["held"]) / 2**30, 2)
    yield row(f"{name}, peak memory", hello["peak"] / 2**30, "GiB", beyond_weights=over, threads=threads)


def race(us: Contestant, sides: list[Side], job: Job, pairs: int) -> tuple[Side, Duel]:
    """Against the fastest of a peer's settings."""
    with ExitStack() as stack:
        programs: dict[str, Contestant] = {}
        for side in sides:
            key = repr(side.settings)
            if key not in programs:
                programs[key] = stack.enter_context(Contestant(side.program, side.settings))
        best = sides[0]
        if len(sides) > 1:
            tried = [[rate(programs[repr(side.settings)], job, side.how) for _ in range(2)][-1] for side in sides]
            best = sides[tried.index(max(tried))]
        return best, duel(us, programs[repr(best.settings)], job, best.how, pairs)


def _figure(shape: Shape, fmt: str, job: Job, side: Side | None, result: Duel, hello: Answer, threads: int) -> Row:
    if job.kind == "prefill":
        what, share = f"prompt of {job.context}", None
    else:
        rows = "1 row" if job.rows == 1 else f"{job.rows} rows"
        share = result.share(hello["read_per_step"] / job.rows)
        what = f"decode, {rows} after {job.context} tokens each"
    return row(
        f"{shape.name}, {fmt}, {what}",
        result.ours,
        "tokens/s",
        peer=None if side is None else round(result.theirs, 2),
        ratio=None if side is None else result.ratio,
        bound_share=share,
        against=None if side is None else side.label,
        read_gb=round(result.read / 1e9, 1),
        pairs=len(result.pairs),
        dtype=hello["dtype"],
        threads=threads,
    )


def _peers(shape: Shape, folder: Path, fmt: str, threads: int, options: argparse.Namespace) -> Iterator[list[Side]]:
    if "llama.cpp" in options.peers:
        sides = []
        for recipe in FORMATS[fmt]:
            file = folder / f"{recipe}.gguf"
            if not file.exists():
                subprocess.run(
                    [sys.executable, str(HERE / "write_gguf.py"), options.shape, recipe, str(file)], check=True
                )
            settings = {"file": str(file), "threads": threads, "rows": ROWS, "context": CONTEXT, "mmap": options.mmap}
            for flash in {"on": [True], "off": [False], "both": [True, False]}[options.flash]:
                label = f"llama.cpp {recipe}, flash attention {'on' if flash else 'off'}"
                sides.append(Side(label, "run_llamacpp.py", settings, {"flash": flash}))
        yield sides
    if "transformers" in options.peers and fmt == "bf16":
        yield [
            Side(
                f"transformers, {dtype}",
                "run_transformers.py",
                {"folder": str(folder), "threads": threads, "dtype": dtype},
            )
            for dtype in ("bfloat16", "float32")
        ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def words(allowed: Mapping[str, object] | tuple[str, ...]):
        def parse(text: str) -> list[str]:
            chosen = text.split(",")
            if unknown := set(chosen) - set(allowed):
                raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not among {', '.join(allowed)}")
            return chosen

        return parse

    peers = ("llama.cpp", "transformers")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--folder", default="build/bench", help="where models are made and kept")
    parser.add_argument("--site", help="a folder of packages for the peers")
    parser.add_argument("--formats", type=words(FORMATS), default=list(FORMATS))
    parser.add_argument("--jobs", type=words(JOBS), default=["decode", "decode16", "prefill128", "prefill512"])
    parser.add_argument("--peers", type=words(peers), default=None, help="those that are installed by default")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, help="physical cores by default")
    parser.add_argument("--mmap", action="store_true", help="llama.cpp maps its files instead of reading them")
    parser.add_argument("--load-once", action="store_true", help="smaller weights are not kept and loaded again")
    parser.add_argument("--flash", choices=("on", "off", "both"), default="both", help="llama.cpp's flash attention")
    parser.add_argument("--save", default="cpu", help="name of the file of results")
    options = parser.parse_args()
    if options.peers is None:
        found = {"llama.cpp": bool(options.site or find_spec("llama_cpp")), "transformers": find_spec("transformers")}
        options.peers = [name for name in peers if found[name]]
        for name in sorted(set(peers) - set(options.peers)):
            print(f"{name} is not installed: not measured", file=sys.stderr)
    return options


if __name__ == "__main__":
    main()
