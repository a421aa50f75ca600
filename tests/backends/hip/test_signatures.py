"""Each call of torch.cuda in the backend, and in the code of all torch devices that it uses, fits the installed torch.

torch's ROCm build has the functions of its CUDA build.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from localllm.backends.pytorch.graphs import cuda as recorder

from ..signatures import INDIRECT, Call, check, direct_calls

DIRECT = direct_calls(torch.cuda, Path(recorder.__file__))
GRAPH: tuple[Call, ...] = (
    ("CUDAGraph.capture_begin", 1, ("pool", "capture_error_mode")),
    ("CUDAGraph.capture_end", 1, ()),
    ("CUDAGraph.replay", 1, ()),
)


def test_the_sources_are_read() -> None:
    assert "CUDAGraph" in {name for name, *_ in DIRECT}


@pytest.mark.contract
@pytest.mark.parametrize("call", [*DIRECT, *INDIRECT, *GRAPH], ids=lambda call: call[0])
def test_call(call: Call) -> None:
    check(torch.cuda, call)


@pytest.mark.parametrize("call", [("no_such_function", 0, ()), ("mem_get_info", 2, ()), ("stream", 1, ("priority",))])
def test_call_that_does_not_fit_is_noticed(call: Call) -> None:
    with pytest.raises((AttributeError, TypeError)):
        check(torch.cuda, call)
