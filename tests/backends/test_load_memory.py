"""The memory that loading needs in addition to the loaded weights: little, also for a large weight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from localllm.backends.cpu import device

from .tiny import HIDDEN, TINIES

VOCAB = 2_000_000  # so the embedding, and a head, of 192 MB as stored
ALLOWED = 128 * 2**20  # 30 to 90 MB are taken, as memory that is given back is not always gone at once
SLOW = pytest.mark.slow
CLEAR = Path("/proc/self/clear_refs")  # makes the peak what is held now

PROGRAM = """
import sys
from pathlib import Path

import torch
from localllm.backends.cpu.device import open_on_cpu
from localllm.engine.modelfiles import read_model
from localllm.engine.options import LoadOptions

def held(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

budget = LoadOptions(cache_bytes=2**20, max_rows=1, quant=sys.argv[2])
open_on_cpu(read_model(sys.argv[3]), budget, 2**33).close()  # what is made once in a process is made
Path("/proc/self/clear_refs").write_text("5")
before = held("VmRSS:")
runner = open_on_cpu(read_model(sys.argv[1]), budget, 2**33)
print(held("VmHWM:") - before - runner.spec.token_bytes)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny bfloat16 model with a large vocabulary."""
    folder = tmp_path_factory.mktemp("large")
    next(tiny for tiny in TINIES if tiny.label == "llama").save(folder, torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.randn(1000, HIDDEN).bfloat16().repeat(VOCAB // 1000, 1)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": VOCAB}))
    return folder


@pytest.mark.real
@pytest.mark.skipif(bool(device.MISSING), reason=device.MISSING or "the library is there")
@pytest.mark.skipif(not os.access(CLEAR, os.W_OK), reason=f"no {CLEAR} here")
@pytest.mark.parametrize("quant", ["none", "int4", *(pytest.param(quant, marks=SLOW) for quant in ("int8", "fp8"))])
def test_loading_never_holds_two_copies_of_a_weight(quant: str, large: Path, tmp_path: Path) -> None:
    next(tiny for tiny in TINIES if tiny.label == "llama").save(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(large), quant, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < ALLOWED
