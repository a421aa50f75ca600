"""Long steps, in which the last layer computes only rows that return a result: the result is the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from localllm.backends.cpu.device import DEVICE
from localllm.backends.pytorch.opening import open_runner
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.batch import Batch, Want
from localllm.engine.files.model_files import read_model
from localllm.engine.runner import Runner
from localllm.kernels.ops import Ops
from localllm.kernels.ops.layer import Layer

from . import canary
from .batches import Row, make_batch
from .conformance import BUDGET, Conformance
from .tiny import TINIES, VOCAB

PARTS = replace(DEVICE, ops=replace(DEVICE.ops, layer=Layer()))  # whole layers compute every token


class TestLastLayer(Conformance):
    backend = "cpu"
    same_bits = False

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, tmp_path_factory: pytest.TempPathFactory) -> Runner:
        files = read_model(canary.save(tmp_path_factory.mktemp("canary")))
        return open_runner(files, BUDGET, PARTS, 2**30)


def opened(tiny: str, folder: Path, capturable: int) -> TorchRunner:
    (actual,) = (one for one in TINIES if one.label == tiny)
    actual.save(folder)
    runner = open_runner(read_model(folder), replace(BUDGET, context=64, cache_bytes=2**20), PARTS, 2**30)
    assert isinstance(runner, TorchRunner)
    return TorchRunner(runner.model, runner.kv, runner.spec, runner.device, capturable=capturable)


def steps(groups: int) -> list[Batch]:
    """A chunk that returns nothing, then the rest of its prompt between rows of one token; one returns nothing."""
    drawn = np.random.default_rng(5).integers(0, VOCAB, 60).tolist()
    first, second, third = (range(start, start + 8) for start in (1, 9, 17))
    rows = [
        Row(drawn[40:41], 0, second, want=Want.NOTHING, state=1),
        Row(drawn[20:33], 20, first, want=Want.HIDDEN, state=0),
        Row(drawn[41:50], 0, third, want=Want.HIDDEN, state=3),
        Row(drawn[50:51], 0, range(25, 33), want=Want.HIDDEN, state=2),
    ]
    chunk = [Row(drawn[:20], 0, first, want=Want.NOTHING, state=0)]
    return [make_batch(step, VOCAB, groups=groups) for step in (chunk, rows)]


@pytest.mark.parametrize("tiny", ["llama", "qwen3-biases", "gemma3", "deepseek_v3", "qwen3_5_text"])
def test_answers_and_cache_equal_a_full_last_layer(tmp_path: Path, tiny: str) -> None:
    actual = []
    for capturable in (0, 1000):
        runner = opened(tiny, tmp_path, capturable)
        with torch.inference_mode():
            runner.kv.clear()
        results = [runner.run(batch).result() for batch in steps(len(runner.spec.groups))]
        parts = [part for group in runner.kv.groups for part in (group.keys, group.values) if part is not None]
        actual.append((results[1].hidden, *(part.clone() for part in parts)))
    (hidden, *cache), (expected, *cache_expected) = actual
    assert hidden is not None
    assert np.abs(expected[1:]).max() > 0.1
    np.testing.assert_allclose(hidden, expected, atol=2e-5)
    for own, other in zip(cache, cache_expected, strict=True):
        torch.testing.assert_close(own[:, 1:], other[:, 1:], atol=2e-5, rtol=0)


@pytest.mark.parametrize(("capturable", "last"), [(0, [[], [3]]), (20, [[20], [3]]), (24, [[20], [24]])])
def test_capturable_steps_compute_all_tokens(tmp_path: Path, capturable: int, last: list[list[int]]) -> None:
    token_counts: list[int] = []
    runner = opened("llama", tmp_path, capturable)
    layers, ops = len(runner.kv.keys), runner.device.ops

    def counted(x: torch.Tensor, *arguments: object) -> torch.Tensor:
        token_counts.append(len(x))
        return Ops().activation.silu_and_mul(x)

    activation = replace(ops.activation, silu_and_mul=counted)
    runner.device = replace(runner.device, ops=replace(ops, activation=activation))
    for batch in steps(len(runner.spec.groups)):
        runner.run(batch).result()
    assert token_counts == [*[20] * (layers - 1), *last[0], *[24] * (layers - 1), *last[1]]
