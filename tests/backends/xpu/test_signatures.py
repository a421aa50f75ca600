"""Each call of torch.xpu in the backend, and in the code of all torch devices that it uses, fits the installed torch.

torch's CPU build has the Python functions of torch.xpu, and its classes over dummies.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.xpu import streams

from localllm.backends import xpu

FOLDER = Path(xpu.__file__).parent
ANY = object()
Call = tuple[str, int, tuple[str, ...]]  # name after torch.xpu, number of positional arguments, keywords

# Calls through variables. The first argument of a method is self.
INDIRECT: tuple[tuple[Callable[..., Any], int, tuple[str, ...]], ...] = (
    (torch.xpu.XPUGraph.capture_begin, 1, ("pool",)),
    (torch.xpu.XPUGraph.capture_end, 1, ()),
    (torch.xpu.XPUGraph.replay, 1, ()),
    (torch.xpu.synchronize, 0, ()),
    (torch.xpu.current_device, 0, ()),
    (torch.xpu.current_stream, 0, ()),
    (torch.xpu.graph_pool_handle, 0, ()),
    (torch.xpu.stream, 1, ()),
    (streams.Stream.__new__, 2, ()),
    (streams.Stream.wait_stream, 2, ()),
    (streams.Stream.synchronize, 1, ()),
    (streams.Event.__new__, 1, ("enable_timing",)),
    (streams.Event.record, 1, ()),
    (streams.Event.synchronize, 1, ()),
    (streams.Event.elapsed_time, 2, ()),
)


def calls() -> Iterator[Call]:
    """The calls of torch.xpu in the sources of the backend."""
    for file in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.xpu."):
                name = ast.unparse(node.func).removeprefix("torch.xpu.")
                yield name, len(node.args), tuple(str(keyword.arg) for keyword in node.keywords)


DIRECT = sorted({call for call in calls() if "(" not in call[0]})


def test_the_sources_are_read() -> None:
    assert {name for name, *_ in DIRECT} >= {"XPUGraph", "mem_get_info", "memory_reserved", "empty_cache"}


@pytest.mark.contract
@pytest.mark.parametrize("call", DIRECT, ids=lambda call: call[0])
def test_direct_call(call: Call) -> None:
    name, positional, keywords = call
    target = reduce(getattr, name.split("."), torch.xpu)
    inspect.signature(target).bind(*[ANY] * positional, **dict.fromkeys(keywords, ANY))


@pytest.mark.contract
@pytest.mark.parametrize("call", INDIRECT, ids=lambda call: call[0].__qualname__)
def test_indirect_call(call: tuple[Callable[..., Any], int, tuple[str, ...]]) -> None:
    target, positional, keywords = call
    inspect.signature(target).bind(*[ANY] * positional, **dict.fromkeys(keywords, ANY))


@pytest.mark.contract
def test_xpu_graphs_have_no_error_mode() -> None:
    """If torch adds one, the recorder should name the mode of CUDA graphs."""
    assert "capture_error_mode" not in inspect.signature(torch.xpu.XPUGraph.capture_begin).parameters
    assert list(inspect.signature(torch.xpu.graph).parameters) == ["xpu_graph", "pool", "stream"]
