"""The checks of `localllm selftest` that ops alone do not have: they pass over the fake, and find defects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.backends import npu
from localllm.backends.npu.check import checks
from localllm.backends.npu.formats import WeightFormats
from localllm.backends.npu.ops import OPS
from localllm.backends.npu.products import Dense, Int8Columns
from localllm.backends.pytorch.product_check import run_ops

from .op_cases import OpsOfTorchNpu

pytestmark = pytest.mark.emulated


def defects() -> dict[str, str]:
    return {result.title: result.defect for result in checks(OPS, "npu", torch.bfloat16)}


def test_checks_pass_over_the_fake() -> None:
    results = defects()
    assert not any(results.values())
    assert len(results) == 4


def test_stale_lengths_are_found_in_both_kinds_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_npu.npu.NPUGraph.update", lambda graph, inputs: None)
    wrong = {title for title, defect in defects().items() if defect}
    assert wrong == {f"graph of attention.{kind} with other contexts" for kind in ("paged", "latent")}


def test_each_op_passes_its_own_test_with_the_kernel_that_models_use() -> None:
    """The first cases of attention have the pages of the NPU: the time of a start suffices for few cases."""
    with OpsOfTorchNpu() as called:
        results = {result.title: result.defect for result in run_ops(OPS, "npu", torch.bfloat16)}
    assert not any(results.values()), results
    assert "npu_fused_infer_attention_score_v2" in called.names


def test_read_bandwidth_is_measured() -> None:
    assert (npu.read_bandwidth() or 0) > 0


@pytest.mark.parametrize(
    ("kind", "dims", "named"),
    [
        (Dense, 2, "the product of dense weights"),
        (Dense, 3, "the experts of dense weights"),
        (Int8Columns, 2, "the product of int8 weights"),
        (Int8Columns, 3, "the experts of int8 weights"),
    ],
)
def test_wrong_values_in_fractal_nz_are_named(
    kind: type[Any], dims: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out: Callable[..., Any] = WeightFormats.lay_out

    def shuffled(self: WeightFormats, op: str, weight: Any) -> Any:
        weight = lay_out(self, op, weight)
        data: Tensor = weight.data
        return weight._replace(data=data.flip(-1)) if isinstance(weight, kind) and data.dim() == dims else weight

    monkeypatch.setattr(WeightFormats, "lay_out", shuffled)
    assert defects()["weights in FRACTAL_NZ"].startswith(named)
