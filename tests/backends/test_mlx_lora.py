"""Adapters on MLX: equal to mlx-lm's LoRA layers, in few operations, in little memory."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from peft import LoraConfig, PeftModel

from localllm.backends import mlx
from localllm.backends.mlx.adapter import Forward, find_targets
from localllm.engine.errors import OutOfMemory
from localllm.engine.files.model_files import read_model

from . import canary
from .adapters import (
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
from .conformance import Planned
from .mlx_models import no_memory, plain_model, quantised
from .mlx_operations import of_mlx_lm, of_runner, prompts
from .tiny import VOCAB

pytestmark = [
    pytest.mark.real_otherdevice,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

LENGTH = 14
TARGETS = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]


def save_mlx_adapter(folder: Path, model: nn.Module, rank: int, keys: list[str]) -> None:
    """An adapter with random factors in mlx-lm's layout. mlx-lm itself starts with b = 0."""
    folder.mkdir()
    parameters = {"rank": rank, "scale": 3.0, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, 2, parameters)
    values = np.random.default_rng(rank)
    factors = {
        name: mx.array(values.normal(0, 0.2, value.shape).astype(np.float32))
        for name, value in tree_flatten(model.parameters())
        if name.endswith(("lora_a", "lora_b"))
    }
    mx.save_safetensors(str(folder / "adapters.safetensors"), factors)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """[vocab] log-probabilities behind the tokens, by mlx-lm."""
    values = model(mx.array([list(tokens)]), cache=make_prompt_cache(model))[0, -1].astype(mx.float32)
    return torch.from_numpy(np.array(values)).log_softmax(-1)


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("label", ["qwen3", "llama-tied"])
def test_four_adapters_equal_lora_layers_of_mlx_lm(tmp_path: Path, label: str, bits: int) -> None:
    """The model is plain or quantised, with or without a tied head."""
    tiny = replace(tiny_of(label), more={**tiny_of(label).more, "hidden_size": 64, "intermediate_size": 96})
    tiny.save(tmp_path / "model")
    if bits:
        quantised(tmp_path / "model", group_size=32, bits=bits)
    runner = mlx.open(read_model(tmp_path / "model"), OPTIONS)
    text = np.random.default_rng(3).integers(3, VOCAB, LENGTH).tolist()
    expected = []
    for slot, rank in enumerate((2, 4, 8, 16), start=1):
        folder = tmp_path / f"adapter-{slot}"
        keys = TARGETS if slot % 2 else ["model.embed_tokens", *TARGETS[:slot]]
        save_mlx_adapter(folder, plain_model(tmp_path / "model"), rank, keys)
        expected.append(logits(load_adapters(plain_model(tmp_path / "model"), str(folder)), text))
        put(runner, slot, adapter_of(folder))
    rows = [Row(text, 0, pages(row)) for row in range(4)]
    together = run(runner, rows, [1, 2, 3, 4])
    torch.testing.assert_close(together, torch.stack(expected), rtol=0, atol=5e-3)
    for slot in (1, 2, 3, 4):
        alone = run(runner, [Row(text, 0, pages(5))], [slot])
        torch.testing.assert_close(alone[0], together[slot - 1], rtol=0, atol=1e-4)
    runner.close()


@pytest.mark.parametrize("label", ["mistral3", "mistral3-tied"])
def test_adapters_of_a_multimodal_model(tmp_path: Path, label: str) -> None:
    """mlx-lm has its modules as language_model.model.layers…, PEFT has them as model.language_model.layers…"""
    tiny = tiny_of(label)
    base = tiny.save(tmp_path / "model")
    runner = mlx.open(read_model(tmp_path / "model"), OPTIONS)
    of_peft = tmp_path / "peft"
    save_adapter(base, LoraConfig(r=4, target_modules=r".*language_model.*(q_proj|down_proj|embed_tokens)"), of_peft, 1)
    text = list(range(5, 25))
    put(runner, 1, adapter_of(of_peft))
    expected = log_probabilities(PeftModel.from_pretrained(base, of_peft), text)[-1:]
    assert_equal(run(runner, [Row(text, 0, pages(0))], [1]), expected)
    of_mlx = tmp_path / "mlx"
    keys = ["self_attn.q_proj", "language_model.model.embed_tokens"]
    save_mlx_adapter(of_mlx, plain_model(tmp_path / "model"), 4, keys)
    put(runner, 2, adapter_of(of_mlx))
    wanted = logits(load_adapters(plain_model(tmp_path / "model"), str(of_mlx)), text)
    assert_equal(run(runner, [Row(text, 0, pages(1))], [2]), wanted[None])
    on_torch = open_on("torch_native", tmp_path / "model")
    put(on_torch, 2, adapter_of(of_mlx))
    assert_equal(run(on_torch, [Row(text, 0, pages(1))], [2]), wanted[None])
    on_torch.close()
    runner.close()


@pytest.fixture(scope="module")
def canary_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The canary model, and its adapters with the shifts 1…4."""
    root = tmp_path_factory.mktemp("canary")
    canary.save(root)
    for shift in range(1, canary.KEYS):
        canary.save_adapter(root / f"adapter-{shift}", shift)
    return root


def test_step_of_the_base_model_has_no_operations_of_adapters(canary_folder: Path) -> None:
    runner = mlx.open(read_model(canary_folder), OPTIONS)
    before = [of_runner(Planned(runner, overlap=True), prompts(rows)) for rows in (1, 3)]
    put(runner, 2, adapter_of(canary_folder / "adapter-2"))
    assert [of_runner(Planned(runner, overlap=True), prompts(rows)) for rows in (1, 3)] == before
    runner.close()


@pytest.mark.parametrize("rows", [1, 3])
def test_step_with_an_adapter_has_fewer_operations_than_mlx_lm(tmp_path: Path, rows: int) -> None:
    """mlx-lm multiplies by the adapter's scale in each step; localllm does so when it reads the files."""
    tiny_of("qwen3").save(tmp_path / "model")
    model = plain_model(tmp_path / "model")
    save_mlx_adapter(tmp_path / "adapter", model, 4, TARGETS)
    runner = mlx.open(read_model(tmp_path / "model"), OPTIONS)
    count = of_runner(Planned(runner, overlap=True), prompts(rows), adapter_of(tmp_path / "adapter"))
    assert count < of_mlx_lm(model, prompts(rows))
    runner.close()


def test_load_without_memory_leaves_the_other_slots(canary_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same adapter can be loaded later."""
    runner = mlx.open(read_model(canary_folder), OPTIONS)
    put(runner, 1, adapter_of(canary_folder / "adapter-1"))
    other = adapter_of(canary_folder / "adapter-3")
    runner.prepare_adapter(other)
    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", no_memory)
        with pytest.raises(OutOfMemory):
            runner.load_adapter(4, other)
    text = canary.prompt(1, 24, seed=2)
    for slots in ([1, 0], [1, 4]):
        rows = [Row(text, 0, pages(row)) for row in range(2)]
        batch = replace(make_batch(rows, canary.VOCAB), adapters=np.array(slots, np.int32))
        shifts = (1, 0) if slots[1] == 0 else (1, 3)
        expected = [canary.walk(canary.under(text, shift), 1)[0] for shift in shifts]
        assert runner.run(batch).result().tokens.tolist() == expected
        runner.load_adapter(4, other)
    runner.close()


def test_later_adapter_changes_more_modules(tmp_path: Path) -> None:
    """A row of the first adapter, whose slot is higher, has the same answer beside a row of the later adapter."""
    tiny = tiny_of("llama")
    tiny.save(tmp_path / "model")
    _, linear, embedding = adapter_configs(tiny)
    save_adapter(tiny.save(tmp_path / "copy"), linear, tmp_path / "linear", 1)
    save_adapter(tiny.save(tmp_path / "copy"), embedding, tmp_path / "embedding", 2)
    runner = mlx.open(read_model(tmp_path / "model"), OPTIONS)
    put(runner, 4, adapter_of(tmp_path / "linear"))
    rows = [Row(range(5, 17), 0, pages(row)) for row in range(2)]
    alone = run(runner, rows[:1], [4])
    put(runner, 1, adapter_of(tmp_path / "embedding"))
    beside = run(runner, rows, [4, 1])
    assert_equal(beside[0], alone[0])
    assert (beside[1] - alone[0]).abs().max() > 0.1
    modules: dict[str, Any] = runner._adapters._modules  # type: ignore[attr-defined]
    assert {len(module._a) for module in modules.values()} == {5}, "an index behind the last slot is not detected"
    runner.close()


def test_closed_runner_frees_the_factors_without_a_garbage_collection(canary_folder: Path) -> None:
    runner = mlx.open(read_model(canary_folder), OPTIONS)
    put(runner, 1, adapter_of(canary_folder / "adapter-1"))
    (module,) = map(ref, runner._adapters._modules.values())  # type: ignore[attr-defined]
    gc.disable()
    runner.close()
    gc.enable()
    assert module() is None


class Flat(nn.Module):
    """A projection of tokens without rows, a projection of heads, and a projection that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(32, 64)
        self.rows = nn.QuantizedLinear(64, 32)
        self.flat = nn.Linear(32, 64)
        self.heads = nn.Linear(16, 16)
        self.unused = nn.Linear(64, 64)
        self.layers: list[nn.Module] = []

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        x = self.rows(self.embed_tokens(tokens))
        x = self.flat(x.reshape(-1, 32)).reshape(*tokens.shape, 4, 16)
        x = self.heads(x).reshape(*tokens.shape, 64)
        return self.embed_tokens.as_linear(x)


def test_targets_are_the_modules_that_the_model_calls() -> None:
    model = Flat()
    targets = find_targets(model, Forward(model))
    shapes = {name: (target.in_features, target.out_features) for name, target in targets.items()}
    assert shapes == {"model.embed_tokens": (32, 64), "rows": (64, 32), "lm_head": (64, 32)}
