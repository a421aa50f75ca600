"""Captured steps with adapters on the CPU, with a tape in place of GPU graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode

from localllm.backends import cpu
from localllm.backends.cpu.device import DEVICE, MISSING
from localllm.backends.pytorch.graphs.runner import Captures, GraphRunner
from localllm.backends.pytorch.opening import open_runner
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.batch import Want
from localllm.engine.errors import OutOfMemory
from localllm.engine.files.model_files import read_model
from localllm.engine.options import Graphs
from localllm.engine.runner import Replay
from localllm.kernels.ops.layer import Layer

from . import canary
from .adapters import OPTIONS, adapter_of, assert_equal, put, run, save_adapter
from .batches import Row
from .conformance import BUDGET
from .tape import Tape
from .tiny import TINIES, VOCAB

# PEFT reads properties that transformers deprecates.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

# Whole layers cannot be cut. The C++ kernels and the reference compute any tiles.
TAPED = replace(
    DEVICE, recorder=Tape, ops=replace(DEVICE.ops, layer=Layer()), lora_backends={"triton": DEVICE.ops.lora}
)


@pytest.mark.parametrize(
    ("graphs", "lora_backend"),
    [("full", "auto"), ("breakable", "auto"), ("split", "auto"), ("full", "triton"), ("breakable", "triton")],
)
def test_steps_captured_with_one_adapter_are_replayed_with_five(
    tmp_path: Path, graphs: Graphs, lora_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill, mixed and decode steps equal steps without graphs. Steps without adapters replay captures without
    them."""
    (tiny,) = (tiny for tiny in TINIES if tiny.label == "llama")
    tiny.save(tmp_path / "model")
    options = replace(OPTIONS, lora_backend=lora_backend, compiler="eager", adapter_slots=5, max_step_tokens=64)
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


class Count(TorchDispatchMode):
    """Counts the ops of torch and of the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(bool(MISSING), reason=MISSING or "")
def test_the_number_of_adapters_changes_no_launch_count(tmp_path: Path) -> None:
    """A step of eight rows has as many ops with one adapter as with eight: prefill, mixed and decode."""
    (tiny,) = (tiny for tiny in TINIES if tiny.label == "llama")
    tiny.save(tmp_path / "model")
    config = LoraConfig(r=4, target_modules=["q_proj", "o_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"])
    save_adapter(tiny.save(tmp_path / "copy"), config, tmp_path / "adapter", 1)
    runner = cpu.open(read_model(tmp_path / "model"), replace(OPTIONS, adapter_slots=8))
    for slot in range(1, 9):
        put(runner, slot, adapter_of(tmp_path / "adapter"))
    prefill = [Row(range(5, 11), 0, range(1 + 2 * row, 3 + 2 * row)) for row in range(8)]
    decode = [replace(row, tokens=[7], start=6) for row in prefill]
    mixed = [*decode[:4], *prefill[4:]]
    mixed[5].want = Want.NOTHING
    for rows in (prefill, mixed, decode):
        counts = []
        for slots in ([1] * 8, list(range(1, 9)), [0] * 8):
            run(runner, rows, slots)  # the first step may prepare memory
            with Count() as count:
                run(runner, rows, slots)
            counts.append(count.ops)
        one, eight, base = counts
        assert one == eight
        assert one.total() > base.total()
    runner.close()


def test_a_size_that_does_not_fit_in_memory_is_tried_once(tmp_path: Path) -> None:
    """The steps of this size run without graphs, and the tokens of the step in flight stay."""
    runner = open_runner(read_model(canary.save(tmp_path)), BUDGET, TAPED, 2**30)
    assert isinstance(runner, GraphRunner)
    inputs = runner._inner.inputs
    tries = []

    def capture(size: int) -> Replay:
        tries.append(size)
        inputs._drawn.fill_(-1)
        raise OutOfMemory("no memory for the capture")

    captures = Captures(inputs, capture)
    inputs._drawn.fill_(7)
    assert captures.find(4) is None
    assert captures.find(4) is None
    assert tries == [4]
    assert inputs._drawn.eq(7).all()
    runner.close()
