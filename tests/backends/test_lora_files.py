"""The factors of adapters in the slots of every backend: scales, dtypes, replaced slots, and files that do not fit."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.engine.errors import ModelRefused

from . import canary
from .adapters import (
    BACKENDS,
    OPTIONS,
    adapter_configs,
    adapter_of,
    assert_equal,
    log_probabilities,
    open_on,
    pages,
    put,
    run,
    save_adapter,
    tiny_of,
)
from .batches import Row, make_batch

# PEFT reads properties that transformers deprecates, and warns about tied embeddings and fused phi3 modules.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and an adapter of it."""
    root = tmp_path_factory.mktemp("llama")
    tiny = tiny_of("llama")
    tiny.save(root / "model")
    save_adapter(tiny.save(root / "copy"), adapter_configs(tiny)[0], root / "adapter", 1)
    return root / "model", root / "adapter"


def test_scale_multiplies_the_delta(llama: tuple[Path, Path], tmp_path: Path, backend: str) -> None:
    """Scale 2 equals an adapter with twice the alpha."""
    model, folder = llama
    config = json.loads((folder / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 2 * config["lora_alpha"]}))
    (tmp_path / "adapter_model.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes())
    runner = open_on(backend, model)
    put(runner, 1, adapter_of(folder))
    put(runner, 2, adapter_of(tmp_path))
    prompt = list(range(5, 25))
    one, other = run(runner, [Row(prompt, 0, pages(0)), Row(prompt, 0, pages(1))], [1, 2], [2.0, 1.0])
    assert_equal(one, other)
    runner.close()


def test_reloaded_slot_forgets_the_previous_adapter(llama: tuple[Path, Path], tmp_path: Path, backend: str) -> None:
    model, folder = llama
    runner = open_on(backend, model)
    prompt = list(range(5, 25))
    put(runner, 1, adapter_of(folder))
    first = run(runner, [Row(prompt, 0, pages(0))], [1])
    small = tmp_path / "small"
    tiny = tiny_of("llama")
    save_adapter(tiny.save(tmp_path / "other"), LoraConfig(r=1, target_modules=["o_proj"]), small, 7)
    put(runner, 1, adapter_of(small))
    put(runner, 2, adapter_of(small))
    reloaded, fresh = run(runner, [Row(prompt, 0, pages(0)), Row(prompt, 0, pages(1))], [1, 2])
    assert torch.equal(reloaded, fresh)
    assert (first - reloaded).abs().max() > 0.1
    runner.close()


def test_refused_adapters(llama: tuple[Path, Path], tmp_path: Path, backend: str) -> None:
    model, folder = llama
    runner = open_on(backend, model)
    tiny = tiny_of("llama")
    high = tmp_path / "high"
    save_adapter(tiny.save(tmp_path / "a"), LoraConfig(r=17, target_modules=["q_proj"]), high, 1)
    with pytest.raises(ModelRefused, match="rank 17, but the limit is 16"):
        runner.prepare_adapter(adapter_of(high))
    wider = tmp_path / "wider"
    wide = dataclasses.replace(tiny, more={**tiny.more, "hidden_size": 64, "head_dim": 12})
    save_adapter(wide.save(tmp_path / "b"), LoraConfig(r=4, target_modules=["q_proj"]), wider, 1)
    with pytest.raises(ModelRefused, match="48 x 64, but in the model 48 x 48"):
        runner.prepare_adapter(adapter_of(wider))
    with pytest.raises(ModelRefused, match="its files have changed"):
        runner.prepare_adapter(replace(adapter_of(folder), version="old"))
    none = open_on(backend, model, replace(OPTIONS, adapter_slots=0))
    with pytest.raises(ModelRefused, match="without adapter slots"):
        none.prepare_adapter(adapter_of(folder))
    none.close()
    runner.close()


def test_adapter_of_mlx_lm_changes_a_tied_head(tmp_path: Path, backend: str) -> None:
    """In mlx-lm the factors of the embedding also change the head, because both are one matrix."""
    tiny = tiny_of("llama-tied")
    base = tiny.save(tmp_path / "model")
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        json.dumps({"lora_parameters": {"rank": 4, "scale": 2.0, "keys": ["model.embed_tokens"]}})
    )
    generator = torch.Generator().manual_seed(3)
    weight: Tensor = base.get_input_embeddings().weight.data
    a = torch.randn(len(weight), 4, generator=generator) * 0.3
    b = torch.randn(4, weight.shape[1], generator=generator) * 0.3
    save_file({"model.embed_tokens.lora_a": a, "model.embed_tokens.lora_b": b}, folder / "adapters.safetensors")
    weight += 2.0 * a @ b
    runner = open_on(backend, tmp_path / "model")
    put(runner, 1, adapter_of(folder))
    prompt = list(range(5, 25))
    assert_equal(run(runner, [Row(prompt, 0, pages(0))], [1]), log_probabilities(base, prompt)[-1:])
    runner.close()


def test_adapter_beyond_the_range_of_the_dtype_is_refused(
    llama: tuple[Path, Path], tmp_path: Path, backend: str
) -> None:
    """Finite factors of the file would be infinite on the device, and the answers NaN."""
    model, folder = llama
    (tmp_path / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    factors = load_file(folder / "adapter_model.safetensors")
    large = {name: torch.full_like(factor, 3e38) for name, factor in factors.items()}
    save_file(large, tmp_path / "adapter_model.safetensors")
    runner = open_on(backend, model)
    with pytest.raises(ModelRefused, match="factor is too large"):
        runner.prepare_adapter(adapter_of(tmp_path))
    runner.close()


@pytest.fixture(scope="module")
def canary_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The canary model, and its adapters with the shifts 1…4."""
    root = tmp_path_factory.mktemp("canary")
    canary.save(root)
    for shift in range(1, canary.KEYS):
        canary.save_adapter(root / f"adapter-{shift}", shift)
    return root


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_four_adapters_of_the_canary(canary_folder: Path, backend: str, dtype: str) -> None:
    """Each row has exactly the tokens that its adapter gives alone."""
    runner = open_on(backend, canary_folder, replace(OPTIONS, dtype=dtype))
    for shift in range(1, canary.KEYS):
        put(runner, shift, adapter_of(canary_folder / f"adapter-{shift}"))
    text = canary.prompt(2, 24, seed=1)
    rows = [Row(text, 0, pages(shift)) for shift in range(canary.KEYS)]
    batch = replace(make_batch(rows, canary.VOCAB), adapters=np.arange(canary.KEYS, dtype=np.int32))
    expected = [canary.walk(canary.under(text, shift), 1)[0] for shift in range(canary.KEYS)]
    assert runner.run(batch).result().tokens.tolist() == expected
    runner.close()


def changed_canary(folder: Path, dtype: torch.dtype, first: float | None = None) -> Path:
    """The canary's adapter with shift 2, stored in this dtype, and with this first value."""
    canary.save_adapter(folder, 2)
    file = folder / "adapter_model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    if first is not None:
        next(iter(tensors.values()))[0, 0] = first
    save_file(tensors, file)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_adapter_files_of_each_dtype(canary_folder: Path, tmp_path: Path, backend: str, dtype: torch.dtype) -> None:
    """The canary's factors are exact in each dtype."""
    runner = open_on(backend, canary_folder)
    put(runner, 1, adapter_of(changed_canary(tmp_path, dtype)))
    text = canary.prompt(3, 24, seed=2)
    batch = replace(make_batch([Row(text, 0, pages(0))], canary.VOCAB), adapters=np.array([1], np.int32))
    assert runner.run(batch).result().tokens.tolist() == canary.walk(canary.under(text, 2), 1)
    runner.close()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_adapter_with_nan_or_infinity_is_refused(
    canary_folder: Path, tmp_path: Path, backend: str, value: float
) -> None:
    runner = open_on(backend, canary_folder)
    with pytest.raises(ModelRefused, match="NaN or infinity"):
        runner.prepare_adapter(adapter_of(changed_canary(tmp_path, torch.float32, value)))
    runner.close()
