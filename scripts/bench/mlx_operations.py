"""Graph operations of a decode step on MLX: the runner of localllm beside the loops of mlx-lm, on any device of MLX.

`python scripts/bench/mlx_operations.py [--shape qwen3-0.6b] [--layers 4] [--rows 1,2,8]` counts the operations of the
graph that each step passes to mx.async_eval. One row is compared with mlx_lm.generate.generate_step, several rows of
different lengths with mlx_lm.generate.BatchGenerator. Weights are random; four layers are enough, as all are alike.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.utils import _get_classes, load_model, save_model

from localllm.backends import mlx
from localllm.engine.engine import Engine
from localllm.engine.files.model_files import read_model
from localllm.engine.lora import Adapter
from localllm.engine.options import LoadOptions
from localllm.engine.request import Request
from localllm.engine.runner import DeviceInfo, Runner

STEPS = 12  # decode steps; the last step is counted


def main() -> None:
    from rows import parser, row, save
    from shapes import SHAPES

    arguments = parser(__doc__)
    arguments.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--rows", default="1,2,8")
    arguments.add_argument("--save", default="mlx", help="which results to replace; empty: none")
    options = arguments.parse_args()
    device = mlx.probe()
    assert isinstance(device, DeviceInfo)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        config = {**SHAPES[options.shape].config(), "num_hidden_layers": options.layers, "vocab_size": 1024}
        model_class, arguments = _get_classes(config)
        save_model(path, model_class(arguments.from_dict(config)), donate_model=True)
        (path / "config.json").write_text(json.dumps(config))
        runner = mlx.open(read_model(path), LoadOptions(context=512, max_rows=64))
        for count in map(int, options.rows.split(",")):
            total = of_runner(runner, prompts(count))
            peer = of_mlx_lm(load_model(path)[0], prompts(count))
            name = f"mlx {options.shape} {options.layers} layers, operations of a decode step, {count} rows"
            save(
                options.save,
                [row(name, total, "ops", peer=peer, ratio=peer / total, device=device.name)],
                part=True,
            )


def prompts(rows: int) -> list[list[int]]:
    return [[5 + row] * (20 + row) for row in range(rows)]


def of_runner(runner: Runner, texts: list[list[int]], adapter: Adapter | None = None) -> int:
    """Operations of the last decode step of all rows, by the runner."""
    engine = Engine(runner)
    if adapter is not None:
        engine.register_adapter(adapter)
    for number, text in enumerate(texts):
        engine.submit(Request(str(number), tuple(text), STEPS, adapter=adapter))
    with counted() as counts:
        for _ in range(STEPS - 2):
            engine.step()
    while engine.has_work:
        engine.step()
    return counts[-1]


def of_mlx_lm(model: nn.Module, texts: list[list[int]]) -> int:
    """Operations of the last decode step of all rows, by mlx-lm."""
    with counted() as counts:
        if len(texts) == 1:
            for _ in generate_step(mx.array(texts[0]), model, max_tokens=STEPS):
                pass
            return counts[-1]
        generator = BatchGenerator(model, max_tokens=STEPS)
        generator.insert(texts)
        for _ in range(STEPS):
            generator.next()
        last = counts[-1]
        generator.close()
    return last


@contextmanager
def counted() -> Iterator[list[int]]:
    """Operations of each graph that mx.async_eval gets."""
    counts: list[int] = []
    evaluate: Callable[..., None] = mx.async_eval

    def counting(*arrays: Any) -> None:
        counts.append(operations([x for _, x in tree_flatten(arrays) if isinstance(x, mx.array)]))
        evaluate(*arrays)

    mx.async_eval = counting
    try:
        yield counts
    finally:
        mx.async_eval = evaluate


def operations(arrays: list[mx.array]) -> int:
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return graph.getvalue().count("shape=rectangle")


if __name__ == "__main__":
    main()
