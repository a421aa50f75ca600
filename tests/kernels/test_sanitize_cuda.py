"""scripts/sanitize_cuda checks every CUDA C++ kernel and fails if a tool misses a deliberate error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import cuda_shapes
from cuda_shapes import KERNELS

FOLDER = Path(__file__).parents[2] / "kernels" / "cuda"
WITHOUT_KERNEL = {"decoder_step_shared_bytes", "limit_gpu", "small_batch_fits"}  # ops that start no kernel


def test_every_kernel_has_random_shapes() -> None:
    bindings = "\n".join(file.read_text("utf-8") for file in (FOLDER / "binding").glob("*.cpp"))
    ops = set(re.findall(r'impl\("(\w+)"', bindings)) - WITHOUT_KERNEL
    assert ops
    assert [op for op in sorted(ops) if not any(name.startswith(op) for name in KERNELS)] == []


def test_shapes_that_do_not_reach_the_kernel_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """On some GPUs, a wrapper may use other kernels for all shapes."""
    monkeypatch.setattr(cuda_shapes, "KERNELS", {"gate": lambda pick: torch.ones(1)})
    monkeypatch.setitem(sys.modules, "localllm.kernels.cuda", ModuleType("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sys, "argv", ["cuda_shapes.py", "gate", "--shapes", "2"])
    with pytest.raises(SystemExit, match="gate: none of 2 shapes reached the kernel"):
        cuda_shapes.main()


# A fake compute-sanitizer. For the deliberate errors it prints the text, and exits with the status, of the environment.
SANITIZER = """#!/bin/bash
case "$*" in
  *cuda_shapes.py\\ beyond*) echo "$MEMCHECK"; exit "$CODE" ;;
  *race) echo "$RACECHECK"; exit "$CODE" ;;
  *) echo "gate: 200 shapes, 1 s" ;;
esac
"""
REPORTS = {
    "MEMCHECK": "= Invalid __global__ read of size 16",
    "RACECHECK": "= Error: Race reported between",
    "CODE": "1",
}


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("failure", ["", "other error", "status 0"])
def test_fails_if_a_tool_misses_a_deliberate_error(tmp_path: Path, tool: str, failure: str) -> None:
    for name, text in (("compute-sanitizer", SANITIZER), ("nvcc", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    report = REPORTS | {"": {}, "other error": {tool.upper(): "Error: no device"}, "status 0": {"CODE": "0"}}[failure]
    settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TOOLS": tool, "KERNELS": "gate", "PYTHON": "python"}
    settings["RACECHECK_LIBRARY"] = str(tmp_path / "library")  # otherwise the script builds it
    script = Path(__file__).parents[2] / "scripts" / "sanitize_cuda"
    done = subprocess.run([script], env=os.environ | settings | report, text=True, capture_output=True)
    assert (done.returncode, "no errors" in done.stdout) == ((1, False) if failure else (0, True)), done
    assert ("other results mean nothing" in done.stdout) == bool(failure)
