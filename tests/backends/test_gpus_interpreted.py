"""A model under the names hip and xpu, with the backend's Triton kernels in Triton's interpreter, in a process of its
own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..accelerator import INTERPRETED

pytest.importorskip("triton")

SAMPLE = "test_float32 and llama-tied"  # float32: the interpreter's products of bfloat16 are wrong


@pytest.mark.emulated
@pytest.mark.timeout(300)
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
@pytest.mark.parametrize("backend", ["hip", pytest.param("xpu", marks=pytest.mark.slow)])
def test_model_with_the_triton_kernels(backend: str) -> None:
    # numpy warns where the kernels take a loop's bound out of an array, and the logarithm of 0.
    calm = ("-W", "ignore:Conversion of an array with ndim:DeprecationWarning", "-W", "ignore:divide by zero")
    file = Path(__file__).parent / backend / f"test_{backend}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *calm, str(file), "-k", SAMPLE]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=file.parents[3], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
