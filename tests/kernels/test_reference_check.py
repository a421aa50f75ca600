"""The comparison with the reference: shapes, integers, NaN, infinities and tolerances."""

from __future__ import annotations

import pytest
import torch

from localllm.kernels.ops.cases.reference_check import mismatch

INF, NAN = torch.inf, torch.nan


def of(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(values)]


@pytest.mark.parametrize(
    ("found", "expected", "says"),
    [
        (of(1.0, 2.0), of(1.0, 2.0), ""),
        (of(1.0, 2.02), of(1.0, 2.0), ""),  # of the largest magnitude, not of its own
        (of(1.015, 2.0), of(1.0, 2.0), ""),
        (of(1.0, 2.05), of(1.0, 2.0), "is off by 0.05 of 2"),
        (of(1.0, -2.0), of(1.0, 2.0), "is off by 4 of 2"),
        (of(1.03, 2.0), of(1.0, -2.0), "is off by 4 of 2"),
        (of(0.0, 5e-9), of(0.0, 0.0), ""),  # beside nothing, a little is allowed
        (of(0.0, 5e-8), of(0.0, 0.0), "is off by 5e-08 of 0"),
        (of(1.0, NAN), of(1.0, 2.0), "returns NaN"),
        (of(1.0, NAN), of(1.0, INF), "returns NaN"),
        (of(INF, 1.0), of(INF, 1.0), ""),
        (of(-INF, 1.0), of(INF, 1.0), "is off by inf of 1"),
        (of(INF, 1.0), of(3.0, 1.0), "is off by inf of 3"),
        (of(INF), of(INF), ""),
        ([torch.tensor([1, 2])], [torch.tensor([1, 2])], ""),
        ([torch.tensor([1, 3])], [torch.tensor([1, 2])], "returns wrong integers"),
        ([*of(1.0), torch.tensor([1]), *of(9.0)], [*of(1.0), torch.tensor([1]), *of(1.0)], "is off by 8 of 1"),
        (of(1.0), of(1.0) + of(1.0), "returns the wrong shape"),
        (of(1.0, 1.0), [torch.ones(2, 1)], "returns the wrong shape"),
        ([torch.empty(0, 3)], [torch.empty(0, 3)], ""),
    ],
)
def test_mismatch_describes_the_difference(found: list[torch.Tensor], expected: list[torch.Tensor], says: str) -> None:
    assert mismatch(found, expected, 0.01) == says
