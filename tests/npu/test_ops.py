"""The ops of torch_npu: each rule refuses a call, each reference has the shapes of torch_npu's own meta kernel."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from . import kernels
from .environment import HERE
from .ops import OPS
from .ops.rules import Call, Op, Refused, read_rules

NAMED = [(name, op) for op in OPS for name in op.names if op.has_rules]
named = pytest.mark.parametrize(("name", "op"), NAMED, ids=[name for name, _ in NAMED])
ALL = pytest.mark.parametrize("op", dict.fromkeys(op for _, op in NAMED), ids=lambda op: type(op).__name__)


def on(value: Any, device: str) -> Any:
    """The value on a device. Lists of tensors are moved too; host tensors of the op stay."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return [item.to(device) for item in value]
    return value


def arguments(op: Op, device: str) -> dict[str, Any]:
    return {name: value if name in op.host else on(value, device) for name, value in op.example().items()}


def example_call(op: Op) -> Call:
    return kernels.Kernel(op.names[0], op).bind((), op.example())


def metadata(result: Any) -> list[tuple[torch.Size, torch.dtype]]:
    results = [result] if isinstance(result, Tensor) else result or []
    return [(tensor.shape, tensor.dtype) for tensor in results]


@named
@pytest.mark.contract
def test_the_reference_has_the_shapes_of_the_meta_kernel(name: str, op: Op) -> None:
    kernel = kernels.Kernel(name, op)
    if not kernel.has_meta or name.endswith(".out"):
        pytest.skip("torch_npu has no meta kernel for this op")
    with FakeTensorMode(), torch.no_grad():
        expected = metadata(kernel.op(**arguments(op, "npu:0")))
    call = kernel.bind((), op.example())
    assert metadata(op.compute(call)) == expected


@ALL
@pytest.mark.contract
def test_a_wrong_call_is_refused_by_its_rule(op: Op) -> None:
    refusals(op)


def refusals(op: Op) -> set[str]:
    """The places of the rules that refuse the wrong calls of an op."""
    call = example_call(op)
    op.check(call)
    places = set()
    for words, changes in op.wrong(call):
        with pytest.raises(Refused) as refusal:
            op.check(Call(**{**vars(call), **changes}))
        assert words in str(refusal.value), (words, str(refusal.value))
        frame = next(entry for entry in reversed(refusal.traceback) if entry.path.name != "rules.py")
        places.add(f"{frame.path.name}:{frame.lineno + 1}")
    return places


@pytest.mark.contract
def test_each_rule_refuses_a_wrong_call() -> None:
    rules = set(read_rules())
    assert len(rules) > 240
    assert set[str]().union(*(refusals(op) for op in OPS if op.has_rules)) == rules


@named
@pytest.mark.emulated
@torch.inference_mode()
def test_an_op_on_the_fake_gives_the_result_of_its_reference(name: str, op: Op) -> None:
    if name.endswith(".out"):
        pytest.skip("graphs call it: test_graphs")
    kernel = kernels.Kernel(name, op)
    torch.manual_seed(0)
    expected_call = kernel.bind((), op.example())
    expected = op.compute(expected_call)
    torch.manual_seed(0)
    values = arguments(op, "npu")
    result = kernel.op(**values)
    for actual, right in zip(tensors(result), tensors(expected), strict=True):
        torch.testing.assert_close(actual.cpu(), right, rtol=0, atol=0, equal_nan=True)
    for written in kernel.written:
        torch.testing.assert_close(values[written].cpu(), vars(expected_call)[written], rtol=0, atol=0)


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result or [])


@pytest.mark.contract
def test_each_op_that_the_backend_calls_has_rules() -> None:
    sources = "".join(file.read_text() for file in (HERE.parents[1] / "backends/npu").glob("*.py"))
    called = {f"{space}::{name}" for space, name in re.findall(r"torch\.ops\.(npu|atb)\.(\w+)", sources)}
    assert len(called) > 20
    assert called <= {name for name, _ in NAMED} | kernels.SPECIAL.keys()
