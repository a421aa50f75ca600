"""Runs the tests of the Triton kernels in Triton's interpreter, on machines without a GPU.

Triton selects the interpreter when it is imported, and then compiles nothing. So the tests run in a process of their
own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..accelerator import INTERPRETED, triton_device

pytest.importorskip("triton")
HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not INTERPRETED and triton_device() != "", reason="the kernels themselves run here"),
    pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process"),
]


@pytest.mark.parametrize(
    "name",
    [
        "test_triton_attention.py",
        "test_triton_elements.py",
        "test_triton_linear.py",
        "test_triton_lora.py",
        "test_triton_moe.py",
        "test_limits.py",
    ],
)
def test_interpreted(name: str, request: pytest.FixtureRequest) -> None:
    # The interpreter takes a loop's bound out of an array of one element, which numpy warns of.
    calm = "ignore:Conversion of an array with ndim:DeprecationWarning"
    # --capture=sys: pytest's files would hide a report of the address sanitizer.
    options = ["-q", "--capture=sys", "-p", "no:cacheprovider", "-W", calm]
    command = [sys.executable, "-m", "pytest", *options, str(HERE / name)]
    command += ["--slow"] if request.config.getoption("--slow") else []
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=HERE.parent.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
