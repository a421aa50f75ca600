"""The test of products with the widths of real models, with small widths instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.backends import platforms
from localllm.backends.pytorch import product_check
from localllm.backends.pytorch.product_check import ProductResult, run_ops, run_products
from localllm.backends.pytorch.selftest import find_defect
from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases.linear import CASES, REAL_CASES

REFERENCES = Ops()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two products of 33 rows, measured with one call."""
    cases = [case for case in CASES if str(case) in ("linear.int8-33-rows", "linear.dense-33-rows")]
    monkeypatch.setattr(product_check, "REAL_CASES", cases)
    monkeypatch.setattr(product_check, "ROWS", (1, 2, 16, 33))
    monkeypatch.setattr(product_check, "TIMED_ROWS", (1, 33))
    monkeypatch.setattr(product_check, "SECONDS", 1e-9)


def results(int8: Any) -> list[ProductResult]:
    ops = replace(REFERENCES, linear=replace(REFERENCES.linear, int8=int8))
    return list(run_products(ops, "cpu", torch.bfloat16))


def test_right_products_are_measured() -> None:
    dense, int8 = results(REFERENCES.linear.int8)
    assert (dense.title, int8.title) == ("linear.dense 33-rows (reference)", "linear.int8 33-rows (reference)")
    assert (dense.weight_bytes, int8.weight_bytes) == (2 * 64 * 48, 96 * 128 + 4 * 96)
    for result in (dense, int8):
        assert result.defect == ""
        assert set(result.seconds) == {1, 33}
        assert min(result.seconds.values()) > 0


def test_product_that_is_wrong_for_some_rows_is_reported() -> None:
    def wrong(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        out: Tensor = REFERENCES.linear.int8(x, weight, bias, dtype)
        return out * float("nan") if len(x) == 16 else out

    dense, int8 = results(wrong)
    assert dense.defect == ""
    assert int8.defect == "16 rows: returns NaN"
    assert set(int8.seconds) == {1}


def test_product_that_fails_is_reported() -> None:
    def fails(**_: Any) -> Tensor:
        raise RuntimeError("no kernel image\nis available")

    int8 = results(fails)[1]
    assert (int8.defect, int8.seconds) == ("fails: RuntimeError: no kernel image", {})


def test_products_and_ops_are_tested_as_in_steps() -> None:
    """With derivatives, torch may call other kernels."""
    modes = []

    def noted(*arguments: Any, **named: Any) -> Any:
        modes.append(torch.is_inference_mode_enabled())
        return REFERENCES.linear.int8(*arguments, **named)

    results(noted)
    find_defect("linear.int8", replace(REFERENCES, linear=replace(REFERENCES.linear, int8=noted)), "cpu", torch.float32)
    assert set(modes) == {True}


def test_op_without_cases_is_not_reported() -> None:
    def packed(*_: Any) -> Any:
        raise AssertionError

    ops = replace(REFERENCES, linear=replace(REFERENCES.linear, pack_slices=packed))
    assert list(run_ops(ops, "cpu", torch.float32)) == []


def test_every_format_has_real_cases() -> None:
    formats = {case.op for case in REAL_CASES}
    assert formats == {f"linear.{name}" for name in ("dense", "int8", "int4", "int4_wide", "fp8", "mxfp4")}
    assert len(REAL_CASES) == 2 * len(formats)


def test_only_products_of_gpus_are_tested() -> None:
    assert list(platforms.device_checks("cpu", "float32")) == []
    assert list(platforms.device_checks("mlx", "float32")) == []
