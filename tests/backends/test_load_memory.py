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

from .tiny import HIDDEN, TINIES, Tiny

VOCAB = 2_000_000  # so that the embedding and the head have 192 MB each in the file
ALLOWED = 128 * 2**20  # a load takes 30 to 90 MB, because freed memory does not always return to the system at once
SLOW = pytest.mark.slow
CLEAR = Path("/proc/self/clear_refs")  # resets the peak to the memory in use now

PROGRAM = """
import sys
from pathlib import Path

import torch
from localllm.backends.cpu.device import open_on_cpu
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions

def held(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

budget = LoadOptions(cache_bytes=2**20, max_rows=1, quant=sys.argv[2])
open_on_cpu(read_model(sys.argv[3]), budget, 2**33).close()  # makes all one-time allocations of the process
Path("/proc/self/clear_refs").write_text("5")
before = held("VmRSS:")
runner = open_on_cpu(read_model(sys.argv[1]), budget, 2**33)
print(held("VmHWM:") - before - getattr(runner.spec, sys.argv[4]))
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


EXPERTS = (16, 2304, 1024)  # number of experts, inner size, hidden size


def save_experts(folder: Path, label: str, *, is_small: bool = False) -> None:
    """A bfloat16 model with one layer, whose experts are stacked and have 226 MB. gpt_oss has transposed tensors."""
    count, inner, hidden = (2, 64, 64) if is_small else EXPERTS
    inner_name = "intermediate_size" if label == "gpt_oss" else "moe_intermediate_size"
    number = "num_local_experts" if label == "gpt_oss" else "num_experts"
    sizes = {inner_name: inner, "hidden_size": hidden, number: 2, "num_experts_per_tok": 1, "num_hidden_layers": 1}
    Tiny(label, label, {**sizes, "head_dim": 16}).save(folder, torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    if label == "qwen3_moe":
        stack(tensors, count)
    else:  # the files have tensors of all experts
        for name in [name for name in tensors if ".experts." in name or ".router." in name]:
            tensors[name] = torch.cat([tensors[name]] * (count // 2))
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    counts = dict.fromkeys(config.keys() & {"num_experts", "num_local_experts"}, count)
    (folder / "config.json").write_text(json.dumps(config | counts))


def stack(tensors: dict[str, torch.Tensor], count: int) -> None:
    """Replace the tensors of the two experts of layer 0 by tensors of `count` experts."""
    gate = "model.layers.0.mlp.gate.weight"
    tensors[gate] = torch.cat([tensors[gate]] * (count // 2))
    experts = "model.layers.0.mlp.experts"

    def popped(projection: str) -> torch.Tensor:
        return torch.stack([tensors.pop(f"{experts}.{expert}.{projection}.weight") for expert in range(2)])

    gate_up = torch.cat([popped("gate_proj"), popped("up_proj")], 1)
    tensors[f"{experts}.gate_up_proj"] = torch.cat([gate_up] * (count // 2))
    tensors[f"{experts}.down_proj"] = torch.cat([popped("down_proj")] * (count // 2))


def more_than_weights(large: Path, small: Path, quant: str, field: str) -> int:
    """The peak of the memory while `large` is loaded, without the bytes in the field `field` of its spec. `small` is
    loaded before: it initialises the process."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(large), quant, str(small), field],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout)


@pytest.mark.real
@pytest.mark.skipif(bool(device.MISSING), reason=device.MISSING or "the library is there")
@pytest.mark.skipif(not os.access(CLEAR, os.W_OK), reason=f"no {CLEAR} here")
@pytest.mark.parametrize("quant", ["none", "int4", *(pytest.param(quant, marks=SLOW) for quant in ("int8", "fp8"))])
def test_loading_never_holds_two_copies_of_a_weight(quant: str, large: Path, tmp_path: Path) -> None:
    next(tiny for tiny in TINIES if tiny.label == "llama").save(tmp_path)
    assert more_than_weights(large, tmp_path, quant, "token_bytes") < ALLOWED


@pytest.mark.real
@pytest.mark.skipif(bool(device.MISSING), reason=device.MISSING or "the library is there")
@pytest.mark.skipif(not os.access(CLEAR, os.W_OK), reason=f"no {CLEAR} here")
@pytest.mark.parametrize(
    ("label", "quant"),
    [
        ("gpt_oss", "none"),
        *(pytest.param("qwen3_moe", quant, marks=SLOW) for quant in ("none", "int8", "int4", "fp8")),
        pytest.param("gpt_oss", "int4", marks=SLOW),
    ],
)
def test_loading_never_has_two_copies_of_stacked_experts(label: str, quant: str, tmp_path: Path) -> None:
    save_experts(tmp_path / "large", label)
    save_experts(tmp_path / "small", label, is_small=True)
    assert more_than_weights(tmp_path / "large", tmp_path / "small", quant, "weight_bytes") < ALLOWED
