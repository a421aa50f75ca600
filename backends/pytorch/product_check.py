"""Tests the ops of a device with small cases, then tests and measures its products with the widths of real models and
1 to 16 and 64 rows, for `localllm selftest`. The self-test at the start of a model (selftest.py) has the small cases
only, which take less time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...kernels.ops import Ops
from ...kernels.ops.cases import CASES
from ...kernels.ops.cases.case import REAL_ROWS, Case
from ...kernels.ops.cases.linear import REAL_CASES
from ...kernels.ops.cases.reference_check import call_op, device_arguments, mismatch, reference_run
from ...kernels.ops.linear import weight_tensors
from .selftest import find_defect

ROWS = (*range(1, 17), REAL_ROWS)
TIMED_ROWS = (1, 16, REAL_ROWS)
SECONDS = 0.02  # duration of a measurement
MAX_REASON = 160  # characters


@dataclass(frozen=True, slots=True)
class ProductResult:
    """The result of one product with all numbers of rows."""

    title: str  # op, implementation and widths
    defect: str  # empty: all results are right
    seconds: Mapping[int, float] = field(default_factory=dict)  # rows -> duration of a product, with its launches
    weight_bytes: int = 0  # that a product reads


def run_ops(ops: Ops, device: str, dtype: torch.dtype) -> Iterator[ProductResult]:
    """The result of every op that has cases and is no reference, on torch's `device` with activations of `dtype`."""
    tested = {case.op for case in CASES}
    for name, _ in ops:
        title = ops.title(name)
        if name in tested and title != "reference":
            yield ProductResult(f"{name} ({title})", find_defect(name, ops, device, dtype))


def run_products(ops: Ops, device: str, dtype: torch.dtype) -> Iterator[ProductResult]:
    """The result of every product in REAL_CASES, computed by `ops` on torch's `device` with activations of `dtype`."""
    for case in REAL_CASES:
        title = f"{case.op} {case.label} ({ops.title(case.op)})"
        try:
            with torch.inference_mode():
                result = _test(case, title, ops, device, dtype)
        except Exception as error:  # compilers and drivers raise many kinds of errors
            reason = f"{type(error).__name__}: {error}".partition("\n")[0][:MAX_REASON]
            yield ProductResult(title, f"fails: {reason}")
        else:
            yield result


def _test(case: Case, title: str, ops: Ops, device: str, dtype: torch.dtype) -> ProductResult:
    """The first defect, and the duration for each of TIMED_ROWS."""
    arguments, (expected,) = reference_run(case, dict(Ops())[case.op], dtype)
    on_device = device_arguments(case, ops, arguments, device, dtype)
    op = dict(ops)[case.op]
    size = sum(tensor.nbytes for tensor in weight_tensors(on_device["weight"]))
    seconds: dict[int, float] = {}
    for rows in ROWS:
        some = on_device | {"x": on_device["x"][:rows]}
        defect = mismatch(call_op(case, op, some), [expected[:rows]], case.tolerances[dtype])
        if defect:
            return ProductResult(title, f"{rows} rows: {defect}", seconds, size)
        if rows in TIMED_ROWS:
            seconds[rows] = _duration(op, some, device)
    return ProductResult(title, "", seconds, size)


def _duration(op: Callable[..., Any], arguments: Mapping[str, Any], device: str) -> float:
    """Seconds of one call, the mean of calls that run for SECONDS without a wait for the device between them."""
    calls = 0
    _wait(device)
    start = time.perf_counter()
    while not calls or time.perf_counter() - start < SECONDS:
        op(**arguments)
        calls += 1
    _wait(device)
    return (time.perf_counter() - start) / calls


def _wait(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()
