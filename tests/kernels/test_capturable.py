"""Every op's reference can be captured in a graph of a GPU: it copies no number of the host, makes no tensor on the CPU
and asks for no number of the device. Seen without a GPU: tensors of torch's meta device, which holds no numbers, go
through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from localllm.kernels.ops import CASES, Ops
from localllm.kernels.ops.case import Case
from localllm.kernels.ops.reference_check import call_op, copy_to

COPYING = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor}


class OnDevice(TorchDispatchMode):
    """Refuses tensors of the CPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves((args, kwargs, made)):
            assert not isinstance(one, Tensor) or one.is_meta, f"{func} has a tensor of the CPU"
        return made


class NoCopies(TorchFunctionMode):
    """Refuses what copies numbers of the host."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        assert func not in COPYING, f"{func} copies numbers of the host"
        return func(*args, **(kwargs or {}))


def capture(op: Callable[..., Any], **arguments: Any) -> None:
    """Raises where a graph of a GPU could not hold what op does."""
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
