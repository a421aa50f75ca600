"""scripts/sanitize_cuda leaves out no CUDA C++ kernel."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import cuda_shapes
from cuda_shapes import KERNELS

FOLDER = Path(__file__).parents[2] / "kernels" / "cuda"
ASKED = {"decoder_step_room"}  # ops that compute nothing


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
