"""Runs the cases of kernels/ops on the NPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases import CASES
from localllm.kernels.ops.cases.case import Case
from localllm.kernels.ops.cases.reference_check import call_op, device_arguments, mismatch, reference_run

DEVICE = "npu"


class OpsOfTorchNpu(TorchDispatchMode):
    """The ops of torch_npu that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "npu":
            self.names.add(func.name().removeprefix("npu::"))
        return func(*args, **(kwargs or {}))


def _cases(family: str) -> Iterator[tuple[Case, torch.dtype]]:
    """The cases of a family in bfloat16 and float32, which models have."""
    for case in CASES:
        if case.op.partition(".")[0] == family:
            yield from ((case, dtype) for dtype in case.tolerances if dtype != torch.float16)


def check_cases(family: str, implementations: Any) -> set[str]:
    """Compare all cases of a family with the references; returns the ops of torch_npu that were called."""
    ops = replace(Ops(), **{family: implementations})
    called = OpsOfTorchNpu()
    for case, dtype in _cases(family):
        arguments, expected = reference_run(case, dict(Ops())[case.op], dtype)
        on_device = device_arguments(case, ops, arguments, DEVICE, dtype)
        with called, torch.inference_mode():
            outputs = call_op(case, dict(ops)[case.op], on_device)
        assert not mismatch(outputs, expected, case.tolerances[dtype]), (str(case), dtype)
    return called.names


def check_contract(family: str, implementations: Any) -> set[str]:
    """Call all cases of a family on meta tensors, with the schemas and the meta kernels of torch_npu. Returns the ops
    that were called."""
    ops = replace(Ops(), **{family: implementations})
    called = OpsOfTorchNpu()
    for case, dtype in _cases(family):
        arguments, expected = reference_run(case, dict(Ops())[case.op], dtype)
        on_meta = device_arguments(case, ops, arguments, "meta", dtype)
        with called, torch.inference_mode():
            outputs = call_op(case, dict(ops)[case.op], on_meta)
        assert [output.shape for output in outputs] == [target.shape for target in expected], str(case)
    return called.names
