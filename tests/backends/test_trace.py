"""The trace of the ops: which implementation computed which shapes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.backends.cpu.device import DEVICE
from localllm.backends.pytorch.opening import open_runner
from localllm.backends.pytorch.runner import TorchRunner
from localllm.backends.pytorch.trace import Call, traced
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions
from localllm.kernels.ops import Ops
from localllm.kernels.ops.norm import Norm, rms_norm
from localllm.kernels.ops.register import REFERENCES, KernelSet

from . import canary
from .conformance import Conversation


def fast(x: Any, weight: Any, eps: float, offset: float = 0.0) -> Any:
    """For one row only."""
    if len(x) > 1:
        return rms_norm(x, weight, eps, offset)
    return x * 1


def failing(x: Any, residual: Any, weight: Any, eps: float, offset: float = 0.0) -> Any:
    raise RuntimeError("no kernel")


OPS = replace(Ops(), norm=Norm(rms=fast, add_rms=failing))
FAST = replace(DEVICE, ops=OPS, kernels=(KernelSet("fast", OPS), REFERENCES))
WEIGHT = torch.ones(8)


def test_implementation_that_calls_another_one_is_shown_with_both() -> None:
    with traced(FAST) as calls:
        for rows in (1, 3, 3):
            OPS.norm.rms(torch.ones(rows, 8), WEIGHT, 1e-6)
        torch.ones(3).sum()
    assert calls == {
        Call("norm.rms", "fast", "1x8 float32, 8 float32", "1x8 float32"): 1,
        Call("norm.rms", "fast > reference", "3x8 float32, 8 float32", "3x8 float32"): 2,
    }
    assert sys.getprofile() is None
    OPS.norm.rms(torch.ones(1, 8), WEIGHT, 1e-6)
    assert sum(calls.values()) == 3, "the trace has ended"


def test_failure_of_an_op_ends_its_call() -> None:
    with traced(FAST) as calls:
        with pytest.raises(RuntimeError):
            OPS.norm.add_rms(torch.ones(1, 8), torch.ones(1, 8), WEIGHT, 1e-6)
        OPS.norm.rms(torch.ones(1, 8), WEIGHT, 1e-6)
    assert [(call.op, call.output) for call in calls] == [("norm.add_rms", ""), ("norm.rms", "1x8 float32")]


def test_op_of_no_set_has_the_name_of_its_function() -> None:
    with traced(replace(DEVICE, ops=OPS)) as calls:
        OPS.norm.rms(torch.ones(1, 8), WEIGHT, 1e-6)
    assert [call.implementation for call in calls] == [f"{__name__}.fast"]


def test_steps_call_the_functions_of_the_record(tmp_path: Path) -> None:
    """A trace replaces no op, so steps without a trace have nothing to check."""
    options = LoadOptions(cache_bytes=2**22, max_rows=2, ops=("norm=reference", "attention=reference"))
    runner = open_runner(read_model(canary.save(tmp_path)), options, DEVICE, 2**30)
    assert isinstance(runner, TorchRunner)
    before = runner.device.ops
    with traced(runner.device) as calls:
        assert runner.device.ops is before
        talk = Conversation(runner)
        talk.submit("a", canary.prompt(0, 25, seed=1), 4)
        assert talk.finish() == {"a": canary.walk(canary.prompt(0, 25, seed=1), 4)}
    used = {call.op: call.implementation for call in calls}
    assert used["norm.add_rms"] == used["attention.paged"] == "reference"
    if DEVICE.kernels != (REFERENCES,):
        assert used["linear.dense"] == "cpp"
