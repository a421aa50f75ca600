"""The fake ACL under torch_npu: memory, streams, events and graphs behave as on a device."""

from __future__ import annotations

import re
import subprocess

import pytest
import torch

from .environment import HEADERS, HERE, LIBRARIES

pytestmark = pytest.mark.emulated

NPU = torch.device("npu", 0)


def test_an_op_computes_with_the_kernel_of_the_cpu() -> None:
    a, b = torch.randn(3, 5), torch.randn(5, 2)
    result = a.to(NPU) @ b.to(NPU) + 1
    assert result.device == NPU
    assert torch.equal(result.cpu(), a @ b + 1)


def test_new_memory_is_poisoned() -> None:
    assert torch.empty(8, device=NPU).isnan().all().item()
    assert (torch.empty(8, device=NPU, dtype=torch.int32).cpu() > 1000).all()


def test_the_headers_of_the_wheel_declare_each_function_of_the_fake() -> None:
    """The compiler compares the types of a function only if a header declares it."""
    headers = "".join(path.read_text(errors="replace") for path in HEADERS.rglob("*.h"))
    declared = set(re.findall(r"\b(acl\w+)\s*\(", headers))
    output = subprocess.run(
        ["nm", "--defined-only", LIBRARIES / "fake_acl.o"], capture_output=True, text=True, check=True
    )
    functions = {line.split()[-1] for line in output.stdout.splitlines() if " T acl" in line}
    assert len(functions) > 60
    assert functions <= declared, functions - declared
    includes = re.findall(r'#include "(.*)"', (HERE / "fake_acl.c").read_text())
    assert all((HEADERS / name).exists() for name in includes)
