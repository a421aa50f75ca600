"""Files that transformers loads in spite of odd tensors and names: MLX computes the same, or `accepts` refuses them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")

from localllm.backends import mlx
from localllm.engine.files.model_files import read_model

from .batches import Row
from .test_config_parity import prompt_of, saved
from .test_mlx_families import near
from .test_mlx_formats import BUDGET, Opened, refused
from .test_odd_files import CASES

pytestmark = pytest.mark.real_otherdevice

REFUSED = {"float64": "F64", "float64, tied": "F64", "a bias of zeros": "not in model: model.layers.0.self_attn.q_proj"}


@pytest.mark.parametrize("label", CASES)
def test_odd_tensors(label: str, tmp_path: Path) -> None:
    family, fields, change, _ = CASES[label]
    file = saved(tmp_path, family, fields, {}) / "model.safetensors"
    save_file({name: tensor.contiguous().clone() for name, tensor in change(load_file(file)).items()}, file)
    if label in REFUSED:
        assert REFUSED[label] in refused(tmp_path)
        return
    assert mlx.accepts(read_model(tmp_path)) == ""
    opened, prompt = Opened(tmp_path), prompt_of()
    opened.model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    near(opened.step(Row(prompt, 0, opened.pages(len(prompt)))), opened.expected(prompt)[-1:])


def test_shards_of_other_names_are_refused(tmp_path: Path) -> None:
    file = saved(tmp_path, "llama", {}, {}) / "model.safetensors"
    weights = dict.fromkeys(load_file(file), "weights.safetensors")
    file.rename(tmp_path / "weights.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    assert "No safetensors found" in refused(tmp_path)


def test_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """mlx-lm reads every file whose name begins with `model`, in any order."""
    file = saved(tmp_path, "llama", {}, {}) / "model.safetensors"
    save_file({"model.norm.weight": torch.ones(48)}, tmp_path / "model.old.safetensors")
    assert "model.norm.weight is in model.old.safetensors and in model.safetensors" in refused(tmp_path)
    file.with_name("model.old.safetensors").unlink()
    assert mlx.open(replace(read_model(tmp_path), name="one file"), BUDGET)
