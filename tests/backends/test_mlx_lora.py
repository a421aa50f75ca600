"""Adapters on MLX, against PEFT and against mlx-lm's LoRA layers."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from localllm.backends import mlx
from localllm.backends.mlx.adapter import Forward, find_targets
from localllm.engine.engine import Engine
from localllm.engine.errors import ModelRefused, OutOfMemory
from localllm.engine.modelfiles import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.runner import Runner
from scripts.bench.mlx_operations import of_mlx_lm, of_runner, prompts

from . import canary
from .batches import Row, make_batch
from .conformance import Planned
from .mlx_models import EXPERTS, SMALL, no_memory, plain_model, quantised
from .test_adapter_swaps import OPTIONS as SWAP_OPTIONS
from .test_adapter_swaps import Answers, Swaps, started
from .test_lora import adapter_configs, adapter_of, assert_equal, log_probabilities, pages, put, run, save_adapter
from .tiny import TINIES, VOCAB, Tiny

pytestmark = [
    pytest.mark.real_otherdevice,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

OPTIONS = replace(SMALL, adapter_slots=4, adapter_rank=16)
LENGTH = 14
LABELS = ("llama", "llama-tied", "qwen2", "gemma3", "phi3")
TARGETS = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]


def tiny_of(label: str) -> Tiny:
    return next(tiny for tiny in TINIES if tiny.label == label)


@dataclass
class Adapted:
    """A runner with adapters in slots 1, 2, 3, and log-probabilities of PEFT."""

    runner: Runner
    prompts: list[list[int]]  # of the base model and of each adapter
    expected: list[Tensor]  # [LENGTH, vocab] for each prompt

    def check(self, rows: Sequence[Row], slots: Sequence[int], positions: Sequence[int]) -> None:
        expected = [self.expected[slot][position] for slot, position in zip(slots, positions, strict=True)]
        assert_equal(run(self.runner, rows, slots), torch.stack(expected))


@pytest.fixture(scope="module", params=LABELS)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    tiny = tiny_of(request.param)
    root = tmp_path_factory.mktemp(tiny.label)
    base = tiny.save(root / "model")
    runner = mlx.open(read_model(root / "model"), OPTIONS)
    texts = np.random.default_rng(5).integers(3, VOCAB, (4, LENGTH)).tolist()
    expected = [log_probabilities(base, texts[0])]
    for slot, config in enumerate(adapter_configs(tiny), start=1):
        folder = root / f"adapter-{slot}"
        save_adapter(tiny.save(root / "copy"), config, folder, slot)
        put(runner, slot, adapter_of(folder))
        peft = PeftModel.from_pretrained(tiny.save(root / "copy"), folder)
        expected.append(log_probabilities(peft, texts[slot]))
    yield Adapted(runner, texts, expected)
    runner.close()


def test_prefill_with_several_adapters_equals_peft(adapted: Adapted) -> None:
    rows = [Row(prompt, 0, pages(row)) for row, prompt in enumerate(adapted.prompts)]
    adapted.check(rows, [0, 1, 2, 3], [LENGTH - 1] * 4)


def test_decode_with_several_adapters_equals_peft(adapted: Adapted) -> None:
    slots = [3, 0, 2, 1]
    texts = [adapted.prompts[slot] for slot in slots]
    adapted.check([Row(text[:9], 0, pages(row)) for row, text in enumerate(texts)], slots, [8] * 4)
    for position in range(9, LENGTH):
        rows = [Row([text[position]], position, pages(row)) for row, text in enumerate(texts)]
        adapted.check(rows, slots, [position] * 4)


def test_prefill_beside_decode_equals_peft(adapted: Adapted) -> None:
    """Rows that continue, and rows that begin with other lengths."""
    first = [Row(adapted.prompts[slot][:8], 0, pages(slot)) for slot in (1, 0)]
    adapted.check(first, [1, 0], [7, 7])
    rows = [
        Row(adapted.prompts[1][8:9], 8, pages(1)),
        Row(adapted.prompts[3], 0, pages(3)),
        Row(adapted.prompts[0][8:], 8, pages(0)),
        Row(adapted.prompts[2][:5], 0, pages(2)),
    ]
    adapted.check(rows, [1, 3, 0, 2], [8, LENGTH - 1, LENGTH - 1, 4])


def test_scale_multiplies_the_change_of_the_adapter(tmp_path: Path) -> None:
    """Scale 2 equals an adapter with twice the alpha, and scale 0 the base model."""
    tiny = tiny_of("llama")
    tiny.save(tmp_path / "model")
    config = adapter_configs(tiny)[0]
    save_adapter(tiny.save(tmp_path / "copy"), config, tmp_path / "one", 1)
    config.lora_alpha *= 2
    save_adapter(tiny.save(tmp_path / "copy"), config, tmp_path / "two", 1)
    runner = mlx.open(read_model(tmp_path / "model"), OPTIONS)
    put(runner, 1, adapter_of(tmp_path / "one"))
    put(runner, 2, adapter_of(tmp_path / "two"))
    rows = [Row(range(5, 17), 0, pages(row)) for row in range(4)]
    double, alpha, zero, base = run(runner, rows, [1, 2, 1, 0], [2.0, 1.0, 0.0, 1.0])
    assert_equal(double, alpha)
    assert_equal(zero, base)
    assert (double - base).abs().max() > 0.1
    runner.close()


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
    """Also on a quantised model, and with an embedding that is the head as well."""
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


@pytest.fixture(scope="module")
def canary_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The canary model, and its adapters with the shifts 1…4."""
    root = tmp_path_factory.mktemp("canary")
    canary.save(root)
    for shift in range(1, canary.KEYS):
        canary.save_adapter(root / f"adapter-{shift}", shift)
    return root


def test_four_adapters_of_the_canary_in_bfloat16(canary_folder: Path) -> None:
    """Each row has exactly the tokens that its adapter gives alone."""
    options = LoadOptions(context=64, max_rows=8, page_size=8, dtype="bfloat16", adapter_slots=4)
    runner = mlx.open(read_model(canary_folder), options)
    for shift in range(1, canary.KEYS):
        put(runner, shift, adapter_of(canary_folder / f"adapter-{shift}"))
    text = canary.prompt(2, 24, seed=1)
    rows = [Row(text, 0, pages(shift)) for shift in range(canary.KEYS)]
    batch = replace(make_batch(rows, canary.VOCAB), adapters=np.arange(canary.KEYS, dtype=np.int32))
    expected = [canary.walk(canary.under(text, shift), 1)[0] for shift in range(canary.KEYS)]
    assert runner.run(batch).result().tokens.tolist() == expected
    runner.close()


@pytest.mark.parametrize("operations", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_adapters_change_while_requests_run(tmp_path: Path, operations: int) -> None:
    runner = mlx.open(read_model(canary.save(tmp_path)), SWAP_OPTIONS)
    answers = Answers()
    engine = Engine(runner, answers.add)
    swaps = Swaps(engine, answers, tmp_path, seed=operations)
    with started(engine):
        swaps.run(operations)
        swaps.unload_all()
        answers.wait(0)
        assert answers.tokens == swaps.expected
        assert set(answers.finishes.values()) == {"length"}
        assert not runner._adapters._prepared  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_adapter_files_of_each_dtype(canary_folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """The canary's factors are exact in each dtype."""
    canary.save_adapter(tmp_path, 2)
    file = tmp_path / "adapter_model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    runner = mlx.open(read_model(canary_folder), OPTIONS)
    put(runner, 1, adapter_of(tmp_path))
    text = canary.prompt(3, 24, seed=2)
    batch = replace(make_batch([Row(text, 0, pages(0))], canary.VOCAB), adapters=np.array([1], np.int32))
    assert runner.run(batch).result().tokens.tolist() == canary.walk(canary.under(text, 2), 1)
    runner.close()


def test_adapter_with_nan_is_refused(canary_folder: Path, tmp_path: Path) -> None:
    canary.save_adapter(tmp_path, 2)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, file)
    runner = mlx.open(read_model(canary_folder), OPTIONS)
    with pytest.raises(ModelRefused, match="NaN or infinity"):
        runner.prepare_adapter(adapter_of(tmp_path))
    runner.close()


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


def test_slot_forgets_the_factors_of_the_adapter_before(tmp_path: Path) -> None:
    """The new adapter of the slot has a smaller rank and fewer modules."""
    tiny = tiny_of("llama")
    tiny.save(tmp_path / "model")
    large, small, _ = adapter_configs(tiny)
    small.r = 2
    save_adapter(tiny.save(tmp_path / "copy"), large, tmp_path / "large", 1)
    save_adapter(tiny.save(tmp_path / "copy"), small, tmp_path / "small", 2)
    runner = mlx.open(read_model(tmp_path / "model"), OPTIONS)
    for slot, name in ((1, "large"), (1, "small"), (2, "small"), (3, "large")):
        put(runner, slot, adapter_of(tmp_path / name))
    rows = [Row(range(5, 17), 0, pages(row)) for row in range(3)]
    replaced, fresh, other = run(runner, rows, [1, 2, 3])
    assert torch.equal(replaced, fresh)
    assert (other - fresh).abs().max() > 0.1
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


def test_refused_adapters(canary_folder: Path, tmp_path: Path) -> None:
    adapter = adapter_of(canary_folder / "adapter-1")
    runner = mlx.open(read_model(canary_folder), replace(OPTIONS, adapter_slots=0))
    with pytest.raises(ModelRefused, match="without adapter slots"):
        runner.prepare_adapter(adapter)
    runner.close()
    runner = mlx.open(read_model(canary_folder), replace(OPTIONS, adapter_rank=4))
    with pytest.raises(ModelRefused, match="rank 5, but the limit is 4"):
        runner.prepare_adapter(adapter)
    runner.close()
    EXPERTS.save(tmp_path)
    runner = mlx.open(read_model(tmp_path), OPTIONS)
    with pytest.raises(ModelRefused, match=r"v_proj is 64 x 128, but in the model 24 x 48"):
        runner.prepare_adapter(adapter)
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
    assert shapes == {"embed_tokens": (32, 64), "rows": (64, 32), "lm_head": (64, 32)}
