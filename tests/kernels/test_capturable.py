"""A GPU graph can capture the reference of every op: it copies no host values, creates no CPU tensors and reads no
device values.

The tests need no GPU: they run the ops on torch's meta device, whose tensors have no values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases import CASES
from localllm.kernels.ops.cases.case import Case
from localllm.kernels.ops.cases.reference_check import call_op, copy_to

COPYING = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor}


class OnDevice(TorchDispatchMode):
    """Refuses CPU tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves((args, kwargs, made)):
            assert not isinstance(one, Tensor) or one.is_meta, f"{func} has a tensor of the CPU"
        return made


class NoCopies(TorchFunctionMode):
    """Refuses copies of host values."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        assert func not in COPYING, f"{func} copies numbers of the host"
        return func(*args, **(kwargs or {}))


def capture(op: Callable[..., Any], **arguments: Any) -> None:
    """Raises if a GPU graph cannot capture the op."""
    there = {name: copy_to(value, "meta") for name, value in arguments.items()}
    with NoCopies(), OnDevice():
        op(**there)


@pytest.mark.contract
@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_can_be_captured(case: Case) -> None:
    arguments = case.make(torch.Generator().manual_seed(1), next(iter(case.tolerances)))
    capture(lambda **there: call_op(case, dict(Ops())[case.op], there), **arguments)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x * torch.tensor(3.0, device=x.device),
        lambda x: x * torch.tensor(3.0),
        lambda x: x * x.new_tensor(3.0),
        lambda x: x + torch.arange(4).to(x.device),
        lambda x: x * float(x.sum()),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x if x.any() else -x,
    ],
    ids=["number", "number-of-the-cpu", "new-number", "range-of-the-cpu", "sum", "mask", "copy", "branch"],
)
def test_the_check_notices_code_that_cannot_be_captured(wrong: Callable[[Tensor], Any]) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        capture(wrong, x=torch.ones(4))
