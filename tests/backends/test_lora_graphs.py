"""Captured steps with adapters on the CPU, with a tape in place of GPU graphs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from peft import LoraConfig

from localllm.backends.cpu.device import DEVICE
from localllm.backends.pytorch.graphs.runner import GraphRunner
from localllm.backends.pytorch.opening import open_runner
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.batch import Want
from localllm.engine.modelfiles import read_model
from localllm.engine.options import Graphs
from localllm.kernels.ops.layer import Layer

from .batches import Row
from .tape import Tape
from .test_lora import OPTIONS, adapter_of, assert_equal, put, run, save_adapter
from .tiny import TINIES, VOCAB

# PEFT reads properties that transformers deprecates.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

TAPED = replace(DEVICE, recorder=Tape, ops=replace(DEVICE.ops, layer=Layer()))  # whole layers cannot be cut


@pytest.mark.parametrize("graphs", ["full", "breakable", "split"])
def test_steps_captured_with_one_adapter_are_replayed_with_five(
    tmp_path: Path, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill, mixed and decode steps equal steps without graphs. Steps without adapters replay captures without
    them."""
    (tiny,) = (tiny for tiny in TINIES if tiny.label == "llama")
    tiny.save(tmp_path / "model")
    options = replace(OPTIONS, graphs=graphs, compiler="eager", adapter_slots=5, max_step_tokens=64)
    actual, expected = (
        open_runner(read_model(tmp_path / "model"), replace(options, graphs=each), TAPED, 2**30)
        for each in (graphs, "off")
    )
    assert isinstance(actual, GraphRunner)
    for slot in range(1, 6):
        config = LoraConfig(r=2 * slot, target_modules=["q_proj", "down_proj", "embed_tokens", "lm_head"])
        save_adapter(tiny.save(tmp_path / "copy"), config, tmp_path / f"adapter-{slot}", slot)
        for runner in (actual, expected):
            put(runner, slot, adapter_of(tmp_path / f"adapter-{slot}"))
    prompts = np.random.default_rng(1).integers(3, VOCAB, (6, 8)).tolist()
    pages = [range(1 + 2 * row, 3 + 2 * row) for row in range(6)]
    prefill = [Row(prompt[:6], 0, own) for prompt, own in zip(prompts, pages, strict=True)]
    mixed = [Row(prompt[6:], 6, own) for prompt, own in zip(prompts, pages, strict=True)]
    mixed[1].want = Want.NOTHING
    decode = [Row([token], 8, own) for token, own in enumerate(pages, start=5)]
    for rows in (prefill, mixed, decode):
        if graphs != "full" or rows is decode:
            monkeypatch.setattr(actual._inner, "run", lambda batch: pytest.fail("not replayed"))
        for slots in ([0, 0, 1, 0, 1, 1], [5, 4, 3, 2, 1, 0], [0] * 6):
            assert_equal(*(run(runner, rows, slots) for runner in (actual, expected)))
        monkeypatch.setattr(actual._inner, "run", partial(TorchRunner.run, actual._inner))
    assert list(actual._adapted_decodes._replays) == [8]
    assert list(actual._adapted_prefills._replays) == ([] if graphs == "full" else [48, 12])
    for runner in (actual, expected):
        runner.close()
