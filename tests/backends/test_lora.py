"""Adapters on every backend, against PEFT: several adapters in one batch, in prefill, in decode and in both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from localllm.engine.batch import Want
from localllm.engine.request import Sampling
from localllm.engine.runner import Runner

from .adapters import (
    BACKENDS,
    GPU_BACKENDS,
    LINEAR,
    OPTIONS,
    adapter_configs,
    adapter_of,
    assert_equal,
    log_probabilities,
    logprobs_of,
    mean_error,
    open_on,
    pages,
    put,
    run,
    run_batch,
    save_adapter,
    tiny_of,
)
from .batches import Row
from .tiny import VOCAB, Tiny

# PEFT reads properties that transformers deprecates, and warns about tied embeddings and fused phi3 modules.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

LENGTH = 21
LABELS = ("llama", "llama-tied", "qwen2", "qwen3", "gemma3", "phi3", "mistral", "granite", "ministral3")
RANKS = (1, 8, 16, 64, 3, 8, 64, 16)


@pytest.fixture(scope="module", params=[*BACKENDS, "cpu bfloat16", *GPU_BACKENDS])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass
class Reference:
    """A model, its adapters, and the log-probabilities of PEFT."""

    tiny: Tiny
    model: Path
    adapters: list[Path]
    prompts: list[list[int]]  # of the base model and of each adapter
    expected: list[Tensor]  # [LENGTH, vocab] for each prompt

    @cached_property
    def rounding(self) -> Tensor:
        """[prompts] largest mean error of PEFT in bfloat16 behind a token."""
        return torch.stack([self._rounding(slot) for slot in range(len(self.prompts))])

    def _rounding(self, slot: int) -> Tensor:
        model = self.tiny.auto.from_pretrained(self.model, dtype=torch.bfloat16).eval()
        if slot:
            model = PeftModel.from_pretrained(model, self.adapters[slot - 1], autocast_adapter_dtype=False)
        return mean_error(log_probabilities(model, self.prompts[slot]), self.expected[slot]).max()


def save(tiny: Tiny, folder: Path) -> PreTrainedModel:
    """The model in float32, with weights that bfloat16 represents: a backend that computes in bfloat16 has the same."""
    tiny.save(folder, torch.bfloat16)
    model: PreTrainedModel = tiny.auto.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def reference_of(root: Path, label: str, configs: Sequence[LoraConfig], *, merge: bool = False) -> Reference:
    """`merge`: add the products of the factors to the weights, in float32."""
    tiny = tiny_of(label)
    base = save(tiny, root / "model")
    prompts = np.random.default_rng(5).integers(3, VOCAB, (1 + len(configs), LENGTH)).tolist()
    reference = Reference(tiny, root / "model", [], prompts, [log_probabilities(base, prompts[0])])
    for number, config in enumerate(configs, start=1):
        folder = root / f"adapter-{number}"
        save_adapter(save(tiny, root / "copy"), config, folder, number)
        model = PeftModel.from_pretrained(save(tiny, root / "copy"), folder)
        reference.adapters.append(folder)
        reference.expected.append(log_probabilities(model.merge_and_unload() if merge else model, prompts[number]))
    return reference


@dataclass
class Loaded:
    """A runner with adapter n of the reference in slot n."""

    runner: Runner
    reference: Reference
    dtype: str

    @property
    def prompts(self) -> list[list[int]]:
        return self.reference.prompts

    def check(self, rows: Sequence[Row], slots: Sequence[int]) -> None:
        """Run a step. The row of a slot must have the log-probabilities of PEFT at its last position."""
        positions = [row.start + len(row.tokens) - 1 for row in rows]
        expected = [self.reference.expected[slot][position] for slot, position in zip(slots, positions, strict=True)]
        self.assert_equal(run(self.runner, rows, slots), torch.stack(expected), slots)

    def assert_equal(self, actual: Tensor, expected: Tensor, slots: Sequence[int]) -> None:
        """[rows, vocab] log-probabilities equal the reference in float32; in bfloat16 they differ by at most twice as
        much as those of PEFT in bfloat16."""
        if self.dtype == "float32":
            assert_equal(actual, expected)
        else:
            limits = 2 * self.reference.rounding[list(slots)] + 0.05
            assert (mean_error(actual, expected) <= limits).all(), (mean_error(actual, expected), limits)


def loaded_from(reference: Reference, backend: str) -> Iterator[Loaded]:
    options = replace(OPTIONS, adapter_slots=len(reference.adapters), adapter_rank=64)
    runner = open_on(backend, reference.model, options)
    for slot, folder in enumerate(reference.adapters, start=1):
        put(runner, slot, adapter_of(folder))
    yield Loaded(runner, reference, "bfloat16" if backend.endswith("bfloat16") else "float32")
    runner.close()


@pytest.fixture(scope="module", params=LABELS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    root = tmp_path_factory.mktemp(request.param)
    return reference_of(root, request.param, adapter_configs(tiny_of(request.param)))


@pytest.fixture(scope="module")
def loaded(reference: Reference, backend: str) -> Iterator[Loaded]:
    yield from loaded_from(reference, backend)


def test_prefill_with_several_adapters(loaded: Loaded) -> None:
    loaded.check([Row(prompt, 0, pages(row)) for row, prompt in enumerate(loaded.prompts)], [0, 1, 2, 3])


def test_decode_with_several_adapters(loaded: Loaded) -> None:
    slots = [3, 0, 2, 1]
    prompts = [loaded.prompts[slot] for slot in slots]
    loaded.check([Row(prompt[:12], 0, pages(row)) for row, prompt in enumerate(prompts)], slots)
    for position in range(12, LENGTH):
        loaded.check([Row([prompt[position]], position, pages(row)) for row, prompt in enumerate(prompts)], slots)


def test_prefill_beside_decode(loaded: Loaded) -> None:
    """One step with a decode row, a row that continues its prompt, and two rows that begin theirs."""
    loaded.check([Row(loaded.prompts[slot][:8], 0, pages(slot)) for slot in (1, 0)], [1, 0])
    rows = [
        Row(loaded.prompts[1][8:9], 8, pages(1)),
        Row(loaded.prompts[3], 0, pages(3)),
        Row(loaded.prompts[0][8:], 8, pages(0)),
        Row(loaded.prompts[2][:5], 0, pages(2)),
    ]
    loaded.check(rows, [1, 3, 0, 2])


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Eight adapters of unlike ranks. Each second adapter changes the embedding and the head, but few layers."""
    ends = ("q_proj", "down_proj", "embed_tokens", "lm_head")
    configs = [
        LoraConfig(r=rank, lora_alpha=1 + number, target_modules=list(ends if number % 2 else LINEAR))
        for number, rank in enumerate(RANKS)
    ]
    return reference_of(tmp_path_factory.mktemp("merged"), "llama", configs, merge=True)


@pytest.fixture(scope="module")
def eight(merged: Reference, backend: str) -> Iterator[Loaded]:
    yield from loaded_from(merged, backend)


@pytest.mark.parametrize("count", range(1, len(RANKS) + 1))
def test_adapters_of_unlike_ranks_equal_merged_weights(eight: Loaded, count: int) -> None:
    """Each of these adapters and the base model have a row in prefill, in a mixed step and in decode."""
    slots = [*range(count + 1)]
    even = slots[::2]
    odd = slots[1::2]
    eight.check([Row(eight.prompts[slot][:-2], 0, pages(slot)) for slot in even], even)
    decoding = [Row(eight.prompts[slot][-2:-1], LENGTH - 2, pages(slot)) for slot in even]
    eight.check([*decoding, *(Row(eight.prompts[slot][:-1], 0, pages(slot)) for slot in odd)], [*even, *odd])
    eight.check([Row(eight.prompts[slot][-1:], LENGTH - 1, pages(slot)) for slot in slots], slots)


def test_only_rows_with_an_answer_have_logits(loaded: Loaded) -> None:
    """The output head has the adapters of the drawing rows, with log-probabilities of all tokens and with a penalty."""
    slots = [3, 1, 3, 0, 2]
    rows = [Row(loaded.prompts[slot], 0, pages(row)) for row, slot in enumerate(slots)]
    rows[0].want = Want.NOTHING
    rows[3].want = Want.NOTHING
    expected = torch.stack([loaded.reference.expected[slot][-1] for slot in (1, 3, 2)])
    for row, logprobs in zip((rows[1], rows[2], rows[4]), expected, strict=True):
        row.sampling = Sampling(presence_penalty=2.0)
        row.output = [int(logprobs.argmax())]
    for step in (rows, [replace(row, tokens=row.tokens[-1:], start=LENGTH - 1) for row in rows]):
        result = run_batch(loaded.runner, step, slots)
        loaded.assert_equal(logprobs_of(result), expected, (1, 3, 2))
        penalised = expected.scatter_add(1, expected.argmax(1, keepdim=True), torch.full((3, 1), -2.0))
        if loaded.dtype == "float32":
            assert result.tokens.tolist() == penalised.argmax(1).tolist()


def test_scale_zero_is_the_base_model(loaded: Loaded) -> None:
    prompt = loaded.prompts[0]
    actual = run(loaded.runner, [Row(prompt, 0, pages(0)), Row(prompt, 0, pages(1))], [1, 0], [0.0, 1.0])
    loaded.assert_equal(actual, loaded.reference.expected[0][-1].expand(2, -1), (0, 0))


def test_adapter_changes_the_answer(loaded: Loaded) -> None:
    """The other tests can fail: adapters differ from the base model by far more than the tolerance."""
    prompt = loaded.prompts[1]
    base, adapted = run(loaded.runner, [Row(prompt, 0, pages(0)), Row(prompt, 0, pages(1))], [0, 1])
    assert (base - adapted).abs().max() > 0.1
