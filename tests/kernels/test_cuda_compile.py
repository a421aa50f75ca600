"""The CUDA kernels compile for every GPU we name, without spilling registers. They run in test_cuda.py, on a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from localllm import kernels

ARCHITECTURES = ("80", "86", "89", "90a", "100", "120")
KERNELS = {
    "activation": "gated",
    "append": "append_vectors",
    "attention": "decode_kernel",
    "attention_extend": "extend_kernel",
    "embedding": "look_up",
    "kv": "put",
    "linear_dense": "small_batch",
    "linear_fp8": "small_batch",
    "linear_int4": "small_batch",
    "linear_int4_wide": "small_batch",
    "linear_int8": "small_batch",
    "norm": "normalise",
    "one_row": "one_row_kernel",
    "rope": "turn",
    "round_rows": "round_rows",
    "step": "step_kernel",
}
FOLDER = Path(next(iter(kernels.__path__))) / "cuda"

pytestmark = [
    pytest.mark.compile,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed"),
]


def test_every_source_is_named_here():
    assert {source.stem for source in FOLDER.glob("*.cu")} == set(KERNELS)


@pytest.mark.slow
@pytest.mark.parametrize("stem", KERNELS)
def test_compiles_for_every_architecture(stem, tmp_path):
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ARCHITECTURES]
    done = subprocess.run(
        ["nvcc", "-std=c++17", "-O3", "-fatbin", *targets, "-Xptxas=-v", f"{stem}.cu", "-o", tmp_path / "out.fatbin"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    entries = re.findall(r"Compiling entry function '(\w+)' for 'sm_(\w+)'", done.stderr)
    for number in ARCHITECTURES:
        assert any(KERNELS[stem] in name and target == number for name, target in entries), number
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    assert len(spills) == len(entries)
    assert not any(spills)


def test_the_library_builds_without_a_gpu(tmp_path):
    """Every source for one architecture, and the binding, against whatever torch is here: what only a torch with CUDA
    has is found when it is loaded."""
    choices = ["-DLOCALLLM_CUDA=ON", "-DLOCALLLM_CUDA_ARCHITECTURES=90-real", "-DVARIANTS=generic"]
    for command in (
        ["cmake", "-S", FOLDER.parent, "-B", tmp_path, f"-DPython_EXECUTABLE={sys.executable}", *choices],
        ["cmake", "--build", tmp_path, "--target", "localllm_cuda"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "cuda" / "localllm_cuda.so").is_file()
