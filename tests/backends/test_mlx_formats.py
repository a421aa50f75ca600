"""Formats of stored weights on MLX: an accepted model opens and computes its float weights; others are refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")

from localllm.backends import mlx
from localllm.backends.mlx import architectures
from localllm.engine.errors import ModelRefused
from localllm.engine.files.model_files import read_architecture, read_model
from localllm.engine.options import LoadOptions

from .batches import Row
from .checkpoints import CHECKPOINTS, FLOAT4_CHECKPOINTS, GPT_OSS, Checkpoint, save_mxfp4
from .mlx_models import rewrite
from .mlx_twins import TWINS
from .test_mlx_families import OF, PAGE, REFUSED, Forced, near
from .tiny import TINIES, Tiny

pytestmark = pytest.mark.real_otherdevice

BUDGET = LoadOptions(context=128, cache_bytes=2**22, max_rows=2, page_size=PAGE, dtype="float32")
SIZES = {"hidden_size": 64, "intermediate_size": 96}  # MLX has groups of 32 inputs at least
FORMATS = {checkpoint.label: checkpoint for checkpoint in (*CHECKPOINTS, *FLOAT4_CHECKPOINTS)}
READ = {label for label in FORMATS if "fp8" in label or label.startswith("awq")}
TEXT = [5, 9, 77, 3, 20, 101, 4, 9]


class Opened(Forced):
    """A model on the MLX runner."""

    def __init__(self, folder: Path) -> None:
        self.runner = mlx.open(read_model(folder), BUDGET)
        self._pages = 1

    def answer(self) -> NDArray[np.float32]:
        """Log-probabilities after TEXT [1, vocab]."""
        return self.step(Row(TEXT, 0, self.pages(len(TEXT))))


def refused(folder: Path) -> str:
    """The reason of `accepts`. `open` and the check before a download agree."""
    files = read_model(folder)
    reason = mlx.accepts(files)
    assert reason
    with pytest.raises(ModelRefused) as caught:
        mlx.open(files, BUDGET)
    assert str(caught.value).endswith(reason)
    return reason


@pytest.mark.parametrize("label", FORMATS)
def test_format_opens_or_is_refused_by_name(label: str, tmp_path: Path) -> None:
    checkpoint = FORMATS[label]
    sizes = checkpoint.sizes or {**OF[checkpoint.model].more, **SIZES}
    checkpoint = replace(checkpoint, sizes=sizes, model=OF[checkpoint.model].model_type)
    checkpoint.save(tmp_path / "small", tmp_path / "meant")
    if label in READ:
        assert mlx.accepts(read_architecture(tmp_path / "small")) == ""
        near(Opened(tmp_path / "small").answer(), Opened(tmp_path / "meant").answer())
    else:
        reason = refused(tmp_path / "small")
        assert reason.startswith("mlx-lm does not read weights in the format")
        assert mlx.accepts(read_architecture(tmp_path / "small")) == reason


def store_as(checkpoint: Checkpoint, folder: Path) -> None:
    """Store the projections in the format. The float weights become those that the format means."""
    file, random = folder / "model.safetensors", np.random.default_rng(5)
    (folder / "meant").mkdir()
    (folder / "meant" / "config.json").write_text((folder / "config.json").read_text())
    floats, stored = load_file(file), dict[str, torch.Tensor]()
    for name, tensor in floats.items():
        parts = name.split(".")
        if tensor.dim() == 2 and parts[-2].endswith("_proj") and "vision" not in name and "visual" not in name:
            made, meant = checkpoint.make(*tensor.shape, random)
            floats[name] = meant.contiguous()
            stored |= {f"{name.removesuffix('.weight')}.{part}": value.contiguous() for part, value in made.items()}
        else:
            stored[name] = tensor
    save_file(stored, file)
    save_file(floats, folder / "meant" / "model.safetensors")
    rewrite(folder, lambda config: config.update(quantization_config=dict(checkpoint.config)))


# One model of each architecture.
ARCHITECTURES = [*{(tiny.model_type, tiny.multimodal): tiny for tiny in (*TINIES, *TWINS)}.values()]


@pytest.mark.parametrize("tiny", ARCHITECTURES, ids=str)
def test_fp8_in_every_architecture(tiny: Tiny, tmp_path: Path) -> None:
    tiny.save(tmp_path)
    store_as(FORMATS["fp8-blocks"], tmp_path)
    if tiny.label in REFUSED:
        refused(tmp_path)
    else:
        assert mlx.accepts(read_model(tmp_path)) == ""
        near(Opened(tmp_path).answer(), Opened(tmp_path / "meant").answer())


@pytest.mark.slow
@pytest.mark.parametrize("tiny", ARCHITECTURES, ids=str)
@pytest.mark.parametrize("label", ["compressed-fp8-tensor", "awq", "gptq", "compressed-int4"])
def test_accepted_architecture_and_format_opens(tiny: Tiny, label: str, tmp_path: Path) -> None:
    tiny.save(tmp_path)
    store_as(FORMATS[label], tmp_path)
    if mlx.accepts(read_model(tmp_path)):
        refused(tmp_path)
    else:
        mlx.open(read_model(tmp_path), BUDGET)


def save_ministral(folder: Path) -> None:
    """The layout of Ministral 3: one scale for each tensor, and scales of activations."""
    OF["mistral3"].save(folder)
    file = folder / "model.safetensors"
    stored = load_file(file)
    meant = dict(stored)
    for name in [name for name in stored if "language_model" in name and name.endswith("_proj.weight")]:
        scale = (stored[name].abs().max() / 448).bfloat16()
        numbers = (stored[name] / scale.float()).to(torch.float8_e4m3fn)
        meant[name] = numbers.float() * scale.float()
        base = name.removesuffix("weight")
        stored |= {name: numbers, f"{base}weight_scale_inv": scale, f"{base}activation_scale": torch.tensor(0.05)}
    (folder / "meant").mkdir()
    (folder / "meant" / "config.json").write_text((folder / "config.json").read_text())
    save_file(stored, file)
    save_file(meant, folder / "meant" / "model.safetensors")
    table = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    rewrite(folder, lambda config: config.update(quantization_config=table))


def test_fp8_as_mistral_publishes_it(tmp_path: Path) -> None:
    save_ministral(tmp_path)
    near(Opened(tmp_path).answer(), Opened(tmp_path / "meant").answer())


def test_experts_in_mxfp4_are_read_in_gpt_oss(tmp_path: Path) -> None:
    save_mxfp4(tmp_path / "small", tmp_path / "meant")
    assert mlx.accepts(read_model(tmp_path / "small")) == ""
    assert GPT_OSS.model_type in architectures.VERIFIED


def change_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


NAME = "language_model.model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e8m0fnu])
def test_other_floats_of_8_bits_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    save_ministral(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({NAME: tensors[NAME].float().to(dtype)}))
    assert "which MLX reads as integers" in refused(tmp_path)


def test_fp8_without_its_table_is_refused(tmp_path: Path) -> None:
    save_ministral(tmp_path)
    rewrite(tmp_path, lambda config: config.pop("quantization_config"))
    assert "has the type F8_E4M3, which MLX reads as integers" in refused(tmp_path)


def test_fp8_without_a_scale_is_refused(tmp_path: Path) -> None:
    save_ministral(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.pop(f"{NAME}_scale_inv"))
    assert f"the fp8 tensor {NAME} has no scale" in refused(tmp_path)


def test_dropped_tensor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm's class of ERNIE 4.5 drops the correction bias of its routers, and loads without an error."""
    more = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 40, "moe_num_shared_experts": 1}
    Tiny("ernie", "ernie4_5_moe", {"moe_layer_end_index": 2, "tie_word_embeddings": True, **more}).save(tmp_path)
    monkeypatch.setattr(architectures, "VERIFIED", architectures.VERIFIED | {"ernie4_5_moe"})
    assert re.search(r"drops stored tensors, such as model\.layers\..*\.e_score_correction_bias", refused(tmp_path))


def test_unknown_quantisation_is_refused(tmp_path: Path) -> None:
    TWINS[0].save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "bitnet"}}))
    assert "weights quantised by bitnet are not supported" in refused(tmp_path)
