"""The checks of `localllm selftest` that ops alone do not have: they pass over the fake, and find defects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.backends.npu.check import checks
from localllm.backends.npu.formats import WeightFormats
from localllm.backends.npu.ops import OPS
from localllm.backends.npu.products import Dense, Int8Columns

pytestmark = pytest.mark.emulated


def defects() -> dict[str, str]:
    return {result.title: result.defect for result in checks(OPS, "npu", torch.bfloat16)}


def test_checks_pass_over_the_fake() -> None:
    assert not any(defects().values())


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
