"""The record of an op: its documented rules, its reference, a right call and wrong calls."""

from __future__ import annotations

import ast
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32)

Call = SimpleNamespace  # the arguments of a call by name, with the defaults of the schema
Changes = dict[str, Any]  # of the arguments of a right call

# Models of the tests are tiny, and compare better in float32. With FAKE_NPU_TINY=1, rules about sizes and dtypes that
# they cannot have are not enforced.
IS_TINY = os.environ.get("FAKE_NPU_TINY") == "1"


class Refused(ValueError):
    """A call breaks a rule of torch_npu's documentation. The message is the rule."""


doubts: Counter[str] = Counter()  # calls that break a rule which other projects break on NPUs


def rule(holds: bool, text: str) -> None:
    if not holds:
        raise Refused(text)


def size_rule(holds: bool, text: str) -> None:
    """A rule that tiny models cannot keep."""
    if not IS_TINY:
        rule(holds, text)


def doubtful_rule(holds: bool, text: str) -> None:
    """A rule of the documentation that SGLang or vLLM break on NPUs. It is counted, not enforced."""
    if not holds:
        doubts[text] += 1


def unsupported(*arguments: Any) -> None:
    """Arguments that the references do not have."""
    if any(argument is not None for argument in arguments):
        raise NotImplementedError("the fake NPU has no reference for these arguments")


def dtype_of(tensor: Tensor | None, *dtypes: torch.dtype) -> bool:
    return tensor is None or tensor.dtype in dtypes


def contiguous(*tensors: Tensor | None) -> bool:
    return all(tensor is None or tensor.is_contiguous() for tensor in tensors)


class Op:
    """An op of torch_npu. The check and the wrong calls are beside the reference, in one class for each op."""

    names: tuple[str, ...]  # of the op and its overloads with the same arguments
    has_rules = True  # False: a helper of captures, without documentation
    host: tuple[str, ...] = ()  # the arguments that are tensors of the host

    def example(self) -> Changes:
        """The arguments of a right call, on the CPU."""
        raise NotImplementedError

    def check(self, c: Call) -> None:
        """Raises Refused. Reads no values of tensors."""

    def compute(self, c: Call) -> Any:
        """The results, from CPU tensors. Arguments that the op writes are written."""
        raise NotImplementedError

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        """For each rule: words of its text, and changes of the example that break it."""
        yield from ()


def read_rules() -> list[str]:
    """The places of the enforced rules in the sources of this package."""
    places = []
    for file in sorted(Path(__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            is_rule = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if is_rule and node.func.id in ("rule", "size_rule") and file.name != "rules.py":
                places.append(f"{file.name}:{node.lineno}")
    return places
