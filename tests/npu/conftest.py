"""These tests run in their own environment: `make test-npu`, or `tests/npu/run pytest tests/npu/…`.

Three levels stand in for an Ascend NPU. None of them is a mock of torch_npu, which is the published package.
- Contract: the schemas and meta kernels of torch_npu, under FakeTensor. No op computes.
- Fake ACL: torch_npu's allocator, streams, events and graphs over a C library on host memory (fake_acl.c). Ops compute
  with torch's CPU kernels, or with the references in ops/ (kernels.py).
- Checker: the rules of torch_npu's own documentation of its ops (ops/). Each call over the fake is checked.
The levels do not show numerics, the NZ layout in memory, limits of tiling, or speed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

IS_ACTIVE = "FAKE_ACL" in os.environ
collect_ignore_glob = [] if IS_ACTIVE else ["test_*.py"]

if IS_ACTIVE:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch_npu warns about functions that a complete CANN has
        import torch

        from localllm.backends.npu.installation import start

        start()
        torch.zeros(1, device="npu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:  # torch_npu copies memory by a deprecated function of torch
            item.add_marker(pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"))


@pytest.fixture(params=["late", "early"])
def order(request: pytest.FixtureRequest) -> Iterator[str]:
    """The order of the streams: side streams run as late or as early as their waits allow."""
    from tests.npu import kernels

    kernels.order(early=request.param == "early")
    yield request.param
    kernels.order(early=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not IS_ACTIVE:
        return
    from tests.npu import kernels
    from tests.npu.ops import OPS
    from tests.npu.ops.rules import doubts, read_rules

    names = [name for op in OPS for name in op.names]
    calls = sum(kernels.calls.values())
    line = (
        f"{len(names)} ops of torch_npu with {len(read_rules())} rules; {calls} calls of {len(kernels.calls)} checked"
    )
    terminalreporter.write_line(f"tests/npu: {line}")
    for text, count in doubts.items():
        terminalreporter.write_line(f"tests/npu: {count} calls break a rule that others break on NPUs: {text}")
