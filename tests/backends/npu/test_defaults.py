"""The defaults of NPUs by their memory, the user's values before them, and the limit of captured graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from localllm.backends.npu.defaults import MAX_GRAPHS, PAGE_SIZE, tier
from localllm.backends.pytorch.device import Device
from localllm.backends.pytorch.memory_plan import number_of_graphs, plan
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.runner import RunnerSpec
from localllm.kernels.ops import Ops

from .. import canary
from ..tape import Tape

GIB = 2**30


def planned(memory: int, folder: Path, options: LoadOptions) -> RunnerSpec:
    _, step_tokens, captured_rows = tier(memory)
    device = Device(
        "npu",
        "cpu",
        torch.cpu,
        Ops(),
        torch.float32,
        page_size=PAGE_SIZE,
        step_tokens=step_tokens,
        captured_rows=captured_rows,
        max_graphs=MAX_GRAPHS,
        recorder=Tape,
        row_tokens=None,
    )
    return plan(read_model(canary.save(folder)), options, 2**34, torch.float32, 2**20, device)


@pytest.mark.parametrize(
    ("memory", "step_tokens", "captured_rows"),
    [
        (16 * GIB, 4096, 16),
        (32 * GIB, 4096, 16),
        (32 * GIB + 1, 8192, 64),
        (64 * GIB, 8192, 64),
        (64 * GIB + 1, 8192, 256),
        (128 * GIB, 8192, 256),
    ],
)
def test_defaults_of_every_tier(memory: int, step_tokens: int, captured_rows: int, tmp_path: Path) -> None:
    spec = planned(memory, tmp_path, LoadOptions(max_rows=256))
    assert (spec.max_tokens, spec.graph_rows[-1], spec.groups[0].page_size) == (step_tokens, captured_rows, 128)


@pytest.mark.parametrize("memory", [16 * GIB, 64 * GIB, 128 * GIB])
def test_values_of_the_user_win(memory: int, tmp_path: Path) -> None:
    spec = planned(memory, tmp_path, LoadOptions(max_rows=12, max_step_tokens=1000, page_size=256))
    assert (spec.max_tokens, spec.graph_rows[-1], spec.groups[0].page_size) == (1000, 12, 256)


@pytest.mark.parametrize("limit", [1, 8, 40, None])
@pytest.mark.parametrize("adapter_slots", [0, 4])
def test_captured_graphs_stay_below_the_limit(limit: int | None, adapter_slots: int, tmp_path: Path) -> None:
    files = read_model(canary.save(tmp_path))
    device = Device("npu", "cpu", torch.cpu, Ops(), torch.float32, recorder=Tape, max_graphs=limit)
    options = LoadOptions(max_rows=64, graphs="breakable", adapter_slots=adapter_slots)
    spec = plan(files, options, 2**34, torch.float32, 2**20, device)
    graphs = number_of_graphs(spec.graph_rows, spec.graph_tokens, files.config.num_layers)
    captures = 2 if adapter_slots else 1
    unlimited = plan(files, options, 2**34, torch.float32, 2**20, replace(device, max_graphs=None))
    if limit is None:
        assert (spec.graph_rows, spec.graph_tokens) == (unlimited.graph_rows, unlimited.graph_tokens)
    else:
        assert graphs * captures <= limit
        assert set(spec.graph_rows) < set(unlimited.graph_rows) or set(spec.graph_tokens) < set(unlimited.graph_tokens)
