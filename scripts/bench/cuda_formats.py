"""Decode steps of a shape on a GPU in every weight format. The formats alternate; each is compared with bf16.

`python scripts/bench/cuda_formats.py --shape llama-8b --rows 1,16`. All models are in memory at the same time. To
measure without the CUDA library, set LOCALLLM_CUDA_LIBRARY to a missing file. Outputs are not checked here, but in
cuda_models.py.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from jobs import Setting, decode
from rows import Row, parser, row, save
from shapes import SHAPES
from stepping import Stepped
from weights import stand_in

from localllm import backends
from localllm.engine.options import LoadOptions
from localllm.engine.runner import page_bytes

FORMATS = {"int8": "int8", "int4": "int4", "fp8": "fp8", "bf16": "none"}  # all are compared with the last
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
        on_device = partial(row, device=gpu)
        yield from decode(
            Setting(
                shape,
                lambda name, ours, unit, **more: on_device(f"{shape.name}, {options.lane}, {name}", ours, unit, **more),
                ways=ways,
                rounds=options.rounds,
                cells=cells,
                steps=options.steps,
            )
        )


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--backend", default=backends.AUTO)
    arguments.add_argument("--shape", choices=SHAPES, default="llama-8b")
    arguments.add_argument(
        "--rows", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2, 4, 8, 16]
    )
    arguments.add_argument("--context", type=int, default=1024)
    arguments.add_argument("--rounds", type=int, default=6)
    arguments.add_argument("--steps", type=int, default=32)
    arguments.add_argument("--lane", default="Triton", help="name of the kernels in the results")
    arguments.add_argument("--folder", help="folder for weights; default: a temporary folder")
    arguments.add_argument("--save", default="cuda_formats", help="name of the file of results; empty: none")
    chosen = arguments.parse_args()
    save(chosen.save, measure(chosen), part=True)
