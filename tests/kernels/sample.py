"""Samples of long lists of cases: `make test` runs one case of each kind, `make test-all` runs every case."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")


def one_of_each(
    cases: Iterable[Case], kind: Callable[[Case], Hashable], label: Callable[[Case], str] = str, slow: bool = True
) -> list[Any]:
    """The cases as parameters of a test. Cases after the first of each kind are marked slow; with slow=False no case
    is. A case that is a tuple has one argument per item."""
    kinds: set[Hashable] = set()
    parameters = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        repeated = kind(case) in kinds
        kinds.add(kind(case))
        parameters.append(pytest.param(*values, id=label(case), marks=[pytest.mark.slow] if slow and repeated else []))
    return parameters
