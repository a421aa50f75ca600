"""W8A8 checkpoints of msModelSlim: they equal their float values, and what is not supported is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.app.store.local.refs import has_all_weights
from localllm.backends.cpu.device import DEVICE
from localllm.backends.pytorch.device import Device
from localllm.backends.pytorch.opening import open_runner
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.errors import ModelRefused
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions
from localllm.kernels.ops import Ops
from localllm.kernels.ops.linear import Int8
from localllm.kernels.ops.linear_int8 import int8

from . import modelslim
from .batches import Row, make_batch
from .tiny import VOCAB

BUDGET = LoadOptions(cache_bytes=2**20, max_rows=4, threads=1, dtype="float32")
STATIC = replace(DEVICE, ops=Ops(), static_inputs=True)
UP = "model.layers.1.mlp.up_proj"


def logits(folder: Path, device: Device = DEVICE) -> Tensor:
    runner = open_runner(read_model(folder), BUDGET, device, 2**30)
    assert isinstance(runner, TorchRunner)
    ops = runner.device.ops
    with torch.inference_mode():
        step = runner.inputs.send(make_batch([Row([5, 9, 77, 3, 20, 101], 0, [1])], VOCAB)).step
        every = replace(step, last=torch.arange(6, dtype=torch.int32))
        return runner.model.logits(runner.model(every, ops, runner.kv), ops)


@pytest.mark.parametrize("model", ["llama", "qwen2"])
@pytest.mark.parametrize("device", [DEVICE, STATIC], ids=["by-row", "static"])
@pytest.mark.parametrize(("kind", "old"), [("dynamic", False), ("static", False), ("static", True)])
def test_checkpoint_is_near_its_float_model(kind: str, old: bool, device: Device, model: str, tmp_path: Path) -> None:
    """Biases and offsets are parts of quant_bias."""
    modelslim.save(tmp_path / "small", tmp_path / "meant", getattr(modelslim, kind), model, old=old)
    result, expected = logits(tmp_path / "small", device), logits(tmp_path / "meant")
    assert torch.cosine_similarity(result.flatten(), expected.flatten(), dim=0) > 0.99


def test_static_scales_round_activations_with_their_offset() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 48, generator=generator)
    data = torch.randint(-128, 128, (8, 48), generator=generator).to(torch.int8)
    scale, (step, offset) = torch.rand(8, generator=generator), (0.02, 7.0)
    result = int8(x, Int8(data, scale, torch.tensor([step, offset]).expand(8, 2)))
    rounded = ((x.double() / step + offset).round().clamp(-128, 127) - offset) * step
    assert (rounded - x).abs().max() > step  # some values are beyond the range
    torch.testing.assert_close(result.double(), rounded @ (data.double() * scale.double()[:, None]).t())


def described(**more: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "quant_model_description.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}))

    return change


def stored(end: str, change: Callable[[Tensor], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        file = folder / "quant_model_weights.safetensors"
        tensors = load_file(file)
        change(tensors[f"{UP}.{end}"])
        save_file(tensors, file)

    return rewrite


BAD = {
    "another type": (described(**{f"{UP}.weight": "W4A8_DYNAMIC"}), f"{UP}.weight must be FLOAT or W8A8 or"),
    "cache": (described(kv_quant_type="C8"), "kv_quant_type must be FLOAT"),
    "rotation": (described(optional={"quarot": {"global": "q.safetensors"}}), "without quarot"),
    "weights with offsets": (stored("weight_offset", lambda x: x.add_(1)), "weight_offset is not zero"),
    "two scales": (stored("deq_scale", lambda x: x.mul_(2)), "deq_scale is not input_scale"),
    "no scale": (stored("input_scale", lambda x: x.zero_()), "input_scale 0 or input_offset"),
    "NaN": (stored("deq_scale", lambda x: x.fill_(float("nan"))), "deq_scale"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_supported_is_refused_by_name(name: str, tmp_path: Path) -> None:
    modelslim.save(tmp_path / "small", tmp_path / "meant", modelslim.static)
    change, message = BAD[name]
    change(tmp_path / "small")
    with pytest.raises(ModelRefused, match=message):
        logits(tmp_path / "small")


def test_experts_have_dynamic_scales_only(tmp_path: Path) -> None:
    modelslim.save(tmp_path / "dynamic", tmp_path / "meant", modelslim.dynamic, "mixtral")
    result, expected = logits(tmp_path / "dynamic"), logits(tmp_path / "meant")
    assert torch.cosine_similarity(result.flatten(), expected.flatten(), dim=0) > 0.99
    modelslim.save(tmp_path / "static", tmp_path / "meant", modelslim.static, "mixtral")
    with pytest.raises(ModelRefused, match="static scales of activations are not supported here"):
        logits(tmp_path / "static")


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    modelslim.save(folder, tmp_path / "meant", modelslim.static)
    assert has_all_weights(folder)
    expected = logits(folder)
    shard = "quant_model_weights-00001-of-00001.safetensors"
    (folder / "quant_model_weights.safetensors").rename(folder / shard)
    index = {"weight_map": dict.fromkeys(load_file(folder / shard), shard)}
    (folder / "quant_model_weights.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits(folder), expected)
    (folder / shard).unlink()
    assert not has_all_weights(folder)
    with pytest.raises(ModelRefused, match=f"shard {shard} is missing"):
        read_model(folder)
