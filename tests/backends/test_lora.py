"""Adapters on the torch devices, against PEFT: several adapters in one batch, in prefill, in decode and in both."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.backends import cpu
from localllm.engine.adapterfiles import read_adapter
from localllm.engine.batch import Batch, Want
from localllm.engine.errors import ModelRefused
from localllm.engine.lora import Adapter
from localllm.engine.modelfiles import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.request import Sampling
from localllm.engine.runner import Runner, StepResult

from .batches import Row, make_batch
from .tiny import TINIES, VOCAB, Tiny

# PEFT reads properties that transformers deprecates, and warns about tied embeddings and fused phi3 modules.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

OPTIONS = LoadOptions(context=64, max_rows=8, page_size=8, dtype="float32", adapter_slots=4, adapter_rank=16)
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PHI = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
LENGTH = 21
LABELS = ("llama", "qwen2", "qwen3", "gemma3", "phi3", "mistral")


def adapter_configs(tiny: Tiny) -> list[LoraConfig]:
    """Unlike ranks, targets and scales."""
    linear = PHI if tiny.model_type == "phi3" else LINEAR
    return [
        LoraConfig(r=4, lora_alpha=8, target_modules=list(linear)),
        LoraConfig(r=16, lora_alpha=16, use_rslora=True, target_modules=[linear[0], linear[-1]]),
        LoraConfig(
            r=8,
            lora_alpha=4,
            target_modules=[*linear, "embed_tokens", "lm_head"],
            rank_pattern={"o_proj": 3},
            alpha_pattern={"model.layers.1.mlp.down_proj": 24},
        ),
    ]


def save_adapter(base: torch.nn.Module, config: LoraConfig, folder: Path, seed: int) -> None:
    """A PEFT adapter with random factors. PEFT itself starts with B = 0."""
    model = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    model.save_pretrained(folder, save_embedding_layers=False)
    model.unload()


def adapter_of(folder: Path) -> Adapter:
    return Adapter(folder.name, str(folder), read_adapter(folder).version)


def put(runner: Runner, slot: int, adapter: Adapter) -> None:
    runner.prepare_adapter(adapter)
    runner.load_adapter(slot, adapter)


@dataclass
class Loaded:
    runner: Runner
    expected: list[Tensor]  # [LENGTH, vocab] log-probabilities of the base model and of each adapter
    prompts: list[list[int]]


@pytest.fixture(scope="module", params=LABELS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    tiny = next(tiny for tiny in TINIES if tiny.model_type == request.param or tiny.label == request.param)
    root = tmp_path_factory.mktemp(tiny.label)
    base = tiny.save(root / "model")
    runner = cpu.open(read_model(root / "model"), OPTIONS)
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(3, VOCAB, (4, LENGTH), generator=generator).tolist()
    expected = [log_probabilities(base, prompts[0])]
    for number, config in enumerate(adapter_configs(tiny), start=1):
        folder = root / f"adapter-{number}"
        save_adapter(tiny.save(root / "copy"), config, folder, number)
        put(runner, number, adapter_of(folder))
        judge = PeftModel.from_pretrained(tiny.save(root / "copy"), folder)
        expected.append(log_probabilities(judge, prompts[number]))
    yield Loaded(runner, expected, prompts)
    runner.close()


@torch.inference_mode()
def log_probabilities(model: Any, tokens: Sequence[int]) -> Tensor:
    return model(torch.tensor([list(tokens)])).logits[0].float().log_softmax(-1)


def run(runner: Runner, rows: Sequence[Row], slots: Sequence[int], scales: Sequence[float] | None = None) -> Tensor:
    """[rows, vocab] log-probabilities behind each row."""
    return logprobs_of(run_batch(runner, rows, slots, scales))


def run_batch(
    runner: Runner, rows: Sequence[Row], slots: Sequence[int], scales: Sequence[float] | None = None
) -> StepResult:
    """A step with the log-probabilities of all tokens."""
    batch = make_batch(rows, VOCAB)
    sampling = replace(batch.sampling, logprobs=np.full(len(batch.sampling.logprobs), VOCAB, np.int32))
    scales = [1.0] * len(rows) if scales is None else scales
    adapted: Batch = replace(
        batch, sampling=sampling, adapters=np.array(slots, np.int32), adapter_scales=np.array(scales, np.float32)
    )
    return runner.run(adapted).result()


def logprobs_of(result: StepResult) -> Tensor:
    """[answers, vocab]."""
    assert result.top_tokens is not None
    assert result.top_logprobs is not None
    order = torch.from_numpy(result.top_tokens.copy()).long()
    values = torch.from_numpy(result.top_logprobs.copy())
    return torch.full((len(order), VOCAB), torch.nan).scatter_(1, order, values)


def pages(row: int) -> range:
    return range(1 + 4 * row, 5 + 4 * row)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-3)


def test_prefill_with_several_adapters(loaded: Loaded) -> None:
    rows = [Row(prompt, 0, pages(row)) for row, prompt in enumerate(loaded.prompts)]
    actual = run(loaded.runner, rows, [0, 1, 2, 3])
    assert_equal(actual, torch.stack([logprobs[-1] for logprobs in loaded.expected]))


def test_decode_with_several_adapters(loaded: Loaded) -> None:
    slots = [3, 0, 2, 1]
    prompts = [loaded.prompts[slot] for slot in slots]
    run(loaded.runner, [Row(prompt[:12], 0, pages(row)) for row, prompt in enumerate(prompts)], slots)
    for position in range(12, LENGTH):
        rows = [Row([prompt[position]], position, pages(row)) for row, prompt in enumerate(prompts)]
        actual = run(loaded.runner, rows, slots)
        assert_equal(actual, torch.stack([loaded.expected[slot][position] for slot in slots]))


def test_prefill_beside_decode(loaded: Loaded) -> None:
    run(loaded.runner, [Row(loaded.prompts[slot][:-1], 0, pages(slot)) for slot in (1, 0)], [1, 0])
    rows = [
        Row(loaded.prompts[1][-1:], LENGTH - 1, pages(1)),
        Row(loaded.prompts[3], 0, pages(3)),
        Row(loaded.prompts[0][-1:], LENGTH - 1, pages(0)),
        Row(loaded.prompts[2], 0, pages(2)),
    ]
    slots = [1, 3, 0, 2]
    actual = run(loaded.runner, rows, slots)
    assert_equal(actual, torch.stack([loaded.expected[slot][-1] for slot in slots]))


def test_only_rows_with_an_answer_have_logits(loaded: Loaded) -> None:
    """The output head has the adapters of the drawing rows, with log-probabilities of all tokens and with a penalty."""
    slots = [3, 1, 3, 0, 2]
    rows = [Row(loaded.prompts[slot], 0, pages(row)) for row, slot in enumerate(slots)]
    rows[0].want = Want.NOTHING
    rows[3].want = Want.NOTHING
    expected = torch.stack([loaded.expected[slot][-1] for slot in (1, 3, 2)])
    for row, logprobs in zip((rows[1], rows[2], rows[4]), expected, strict=True):
        row.sampling = Sampling(presence_penalty=2.0)
        row.output = [int(logprobs.argmax())]
    for step in (rows, [replace(row, tokens=row.tokens[-1:], start=LENGTH - 1) for row in rows]):
        result = run_batch(loaded.runner, step, slots)
        assert_equal(logprobs_of(result), expected)
        penalised = expected.scatter_add(1, expected.argmax(1, keepdim=True), torch.full((3, 1), -2.0))
        assert result.tokens.tolist() == penalised.argmax(1).tolist()


def test_scale_zero_is_the_base_model(loaded: Loaded) -> None:
    prompt = loaded.prompts[0]
    actual = run(loaded.runner, [Row(prompt, 0, pages(0)), Row(prompt, 0, pages(1))], [1, 0], [0.0, 1.0])
    assert_equal(actual, loaded.expected[0][-1].expand(2, -1))


def test_adapter_changes_the_answer(loaded: Loaded) -> None:
    """The other tests can fail: adapters differ from the base model by far more than the tolerance."""
    prompt = loaded.prompts[1]
    base, adapted = run(loaded.runner, [Row(prompt, 0, pages(0)), Row(prompt, 0, pages(1))], [0, 1])
    assert (base - adapted).abs().max() > 0.1


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and an adapter of it."""
    root = tmp_path_factory.mktemp("llama")
    tiny = next(tiny for tiny in TINIES if tiny.model_type == "llama")
    tiny.save(root / "model")
    save_adapter(tiny.save(root / "copy"), adapter_configs(tiny)[0], root / "adapter", 1)
    return root / "model", root / "adapter"


def test_scale_multiplies_the_delta(llama: tuple[Path, Path], tmp_path: Path) -> None:
    """Scale 2 equals an adapter with twice the alpha."""
    model, folder = llama
    config = json.loads((folder / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 2 * config["lora_alpha"]}))
    (tmp_path / "adapter_model.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes())
    runner = cpu.open(read_model(model), OPTIONS)
    put(runner, 1, adapter_of(folder))
    put(runner, 2, adapter_of(tmp_path))
    prompt = list(range(5, 25))
    one, other = run(runner, [Row(prompt, 0, pages(0)), Row(prompt, 0, pages(1))], [1, 2], [2.0, 1.0])
    assert_equal(one, other)
    runner.close()


def test_reloaded_slot_forgets_the_previous_adapter(llama: tuple[Path, Path]) -> None:
    model, folder = llama
    runner = cpu.open(read_model(model), OPTIONS)
    prompt = list(range(5, 25))
    put(runner, 1, adapter_of(folder))
    first = run(runner, [Row(prompt, 0, pages(0))], [1])
    small = folder.parent / "small"
    tiny = next(tiny for tiny in TINIES if tiny.model_type == "llama")
    save_adapter(tiny.save(folder.parent / "other"), LoraConfig(r=1, target_modules=["o_proj"]), small, 7)
    put(runner, 1, adapter_of(small))
    put(runner, 2, adapter_of(small))
    reloaded, fresh = run(runner, [Row(prompt, 0, pages(0)), Row(prompt, 0, pages(1))], [1, 2])
    assert torch.equal(reloaded, fresh)
    assert (first - reloaded).abs().max() > 0.1
    runner.close()


def test_refused_adapters(llama: tuple[Path, Path], tmp_path: Path) -> None:
    model, folder = llama
    runner = cpu.open(read_model(model), OPTIONS)
    tiny = next(tiny for tiny in TINIES if tiny.model_type == "llama")
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
    none = cpu.open(read_model(model), replace(OPTIONS, adapter_slots=0))
    with pytest.raises(ModelRefused, match="without adapter slots"):
        none.prepare_adapter(adapter_of(folder))
    none.close()
    runner.close()


def test_adapter_of_mlx_lm_changes_a_tied_head(tmp_path: Path) -> None:
    """In mlx-lm the factors of the embedding change the matrix that is the head as well."""
    tiny = next(tiny for tiny in TINIES if tiny.label == "llama-tied")
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
    runner = cpu.open(read_model(tmp_path / "model"), OPTIONS)
    put(runner, 1, adapter_of(folder))
    prompt = list(range(5, 25))
    assert_equal(run(runner, [Row(prompt, 0, pages(0))], [1]), log_probabilities(base, prompt)[-1:])
    runner.close()


def test_adapter_beyond_the_range_of_the_dtype_is_refused(llama: tuple[Path, Path], tmp_path: Path) -> None:
    """Its finite factors would be infinite on the device, and its answers NaN."""
    model, folder = llama
    (tmp_path / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    factors = load_file(folder / "adapter_model.safetensors")
    large = {name: torch.full_like(factor, 3e38) for name, factor in factors.items()}
    save_file(large, tmp_path / "adapter_model.safetensors")
    runner = cpu.open(read_model(model), OPTIONS)
    with pytest.raises(ModelRefused, match="factor is too large"):
        runner.prepare_adapter(adapter_of(tmp_path))
    runner.close()
