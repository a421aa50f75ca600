"""Decode steps of a shape on a GPU, of every weight format: formats take turns round by round, beside bf16.

`python scripts/bench/cuda_formats.py --shape llama-8b --rows 1,16`. All models are in memory together. Without the CUDA
library where LOCALLLM_CUDA_LIBRARY names a file that is not there. Outputs are not looked at: cuda_models.py does.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from jobs import Setting, decode
from rows import Row, row, save
from shapes import SHAPES
from stepping import Stepped
from weights import stand_in

from localllm import backends
from localllm.engine.options import LoadOptions
from localllm.engine.runner import page_bytes

FORMATS = {"int8": "int8", "int4": "int4", "fp8": "fp8", "bf16": "none"}  # the last is what others are compared with
SPARE = 256  # positions beyond the context


def measure(options: argparse.Namespace) -> Iterator[Row]:
    shape = SHAPES[options.shape]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, ExitStack() as stack:
        files = stand_in(shape, Path(folder))
        choice = backends.choose(options.backend, files)
        gpu = "" if choice.info.main_memory else choice.info.name
        tokens = options.context + SPARE
        pages = max(options.rows) * (tokens // 16 + 1)
        room = pages * page_bytes(16, shape.kv_heads, shape.head_dim, shape.layers, 2 if gpu else 4)
        ways = []
        for fmt in FORMATS:
            budget = LoadOptions(quant=FORMATS[fmt], context=tokens, max_rows=max(options.rows), cache_bytes=room)  # type: ignore[arg-type]
            ways.append(Stepped(fmt, choice.backend.open(files, budget)))
            stack.callback(ways[-1].close)
        cells = [(rows, options.context) for rows in options.rows]
        told = partial(row, device=gpu)
        yield from decode(
            Setting(
                shape,
                lambda name, ours, unit, **more: told(f"{shape.name}, {options.lane}, {name}", ours, unit, **more),
                ways=ways,
                rounds=options.rounds,
                cells=cells,
                steps=options.steps,
            )
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default=backends.AUTO)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--rows", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2, 4, 8, 16])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--lane", default="Triton", help="how figures are named")
    parser.add_argument("--folder", help="where weights are written; a temporary one")
    parser.add_argument("--save", default="cuda_formats", help="name of the file of results; empty: none")
    chosen = parser.parse_args()
    save(chosen.save, measure(chosen), part=True)
