"""scripts/sanitize_cuda leaves out no CUDA C++ kernel."""

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
ASKED = {"decoder_step_shared_bytes", "small_batch_fits"}  # ops that compute nothing


def test_every_kernel_has_random_shapes() -> None:
    bindings = "\n".join(file.read_text("utf-8") for file in FOLDER.glob("binding*.cpp"))
    ops = set(re.findall(r'impl\("(\w+)"', bindings)) - ASKED
    assert ops
    assert [op for op in sorted(ops) if not any(name.startswith(op) for name in KERNELS)] == []


def test_shapes_that_never_reach_the_kernel_are_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a wrapper leaves all of them to others, on a GPU of another kind."""
    monkeypatch.setattr(cuda_shapes, "KERNELS", {"gate": lambda pick: torch.ones(1)})
    monkeypatch.setitem(sys.modules, "localllm.kernels.cuda", ModuleType("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sys, "argv", ["cuda_shapes.py", "gate", "--shapes", "2"])
    with pytest.raises(SystemExit, match="gate: none of 2 shapes reached the kernel"):
        cuda_shapes.main()


# Stands in for compute-sanitizer: of the faults that are there on purpose it says what it is told to.
SANITIZER = """#!/bin/bash
case "$*" in
  *cuda_shapes.py\\ beyond*) echo "$MEMCHECK"; exit "$CODE" ;;
  *race) echo "$RACECHECK"; exit "$CODE" ;;
  *) echo "gate: 200 shapes, 1 s" ;;
esac
"""
SEEN = {"MEMCHECK": "= Invalid __global__ read of size 16", "RACECHECK": "= Error: Race reported between", "CODE": "1"}


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("fails", ["", "ends in another way", "says nothing"])
def test_a_tool_that_misses_a_fault_that_is_there_is_not_believed(tmp_path: Path, tool: str, fails: str) -> None:
    for name, text in (("compute-sanitizer", SANITIZER), ("nvcc", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    says = (
        SEEN | {"": {}, "ends in another way": {tool.upper(): "Error: no device"}, "says nothing": {"CODE": "0"}}[fails]
    )
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TOOLS": tool, "KERNELS": "gate", "PYTHON": "python"}
    own["RACECHECK_LIBRARY"] = str(tmp_path / "library")  # else it is built
    script = Path(__file__).parents[2] / "scripts" / "sanitize_cuda"
    done = subprocess.run([script], env=os.environ | own | says, text=True, capture_output=True)
    assert (done.returncode, "nothing found" in done.stdout) == ((1, False) if fails else (0, True)), done
    assert ("means nothing" in done.stdout) == bool(fails)
