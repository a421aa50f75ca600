"""Teacher-forced logits of tiny random models against transformers, whichever way the tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from localllm.backends import cpu
from localllm.backends.pytorch.models import architectures
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.modelconfig import FAMILIES
from localllm.engine.modelfiles import read_model
from localllm.engine.runner import Budget

from .batches import Row, make_batch
from .tiny import TINIES, VOCAB, Tiny

PAGE = 8
LENGTH = 45
BOUND = 1e-4


def logits_of(runner: TorchRunner, rows: Sequence[Row], copies: Sequence[tuple[int, int]] = ()) -> torch.Tensor:
    """Logits of every token of the step [tokens, vocab]."""
    device = runner.device
    with torch.inference_mode():
        batch = make_batch(rows, runner.spec.vocab_size, copies)
        runner.kv.copy(batch.copies, device)
        step = runner.inputs.send(batch).step
        every = replace(step, last=torch.arange(batch.num_tokens, dtype=torch.int32))
        return runner.model.logits(runner.model(every, device.ops, runner.kv), device.ops)


@dataclass(frozen=True)
class Pair:
    """Our runner, and what transformers gives for two prompts [tokens, vocab]."""

    runner: TorchRunner
    prompts: list[list[int]]
    expected: list[torch.Tensor]


@pytest.fixture(scope="module", params=TINIES, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    tiny: Tiny = request.param
    folder = tmp_path_factory.mktemp(tiny.label)
    model = tiny.save(folder)
    length = 100 if tiny.label == "phi3-longrope-long" else LENGTH
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(3, VOCAB, (2, length), generator=generator).tolist()
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    assert 0.5 < expected[0].std() < 50, "random weights should give logits that differ"
    budget = Budget(context=tiny.context, cache_bytes=2**22, max_rows=8, max_step_tokens=256, page_size=PAGE, threads=1)
    runner = cpu.open(read_model(folder), budget)
    assert isinstance(runner, TorchRunner)
    return Pair(runner, prompts, expected)


def own_pages(row: int) -> range:
    return range(1 + row * 16, 17 + row * 16)


@pytest.mark.real
def test_whole_prompts(pair: Pair) -> None:
    rows = [Row(prompt, 0, own_pages(row)) for row, prompt in enumerate(pair.prompts)]
    torch.testing.assert_close(logits_of(pair.runner, rows), torch.cat(pair.expected), rtol=0, atol=BOUND)


@pytest.mark.real
@pytest.mark.parametrize("chunk", [1, 3, 7, PAGE - 1, PAGE, PAGE + 1])
def test_chunks(pair: Pair, chunk: int) -> None:
    prompt = pair.prompts[0]
    parts = [
        logits_of(pair.runner, [Row(prompt[at : at + chunk], at, own_pages(0))]) for at in range(0, len(prompt), chunk)
    ]
    torch.testing.assert_close(torch.cat(parts), pair.expected[0], rtol=0, atol=BOUND)


@pytest.mark.real
def test_shared_prefix(pair: Pair) -> None:
    """A second sequence reads the first one's pages, and one that the step itself copies."""
    prompt, cached = pair.prompts[0], 2 * PAGE + 3
    logits_of(pair.runner, [Row(prompt, 0, own_pages(0))])
    pages = [*own_pages(0)[:2], *own_pages(1)[:14]]
    row = Row(prompt[cached:], cached, pages)
    found = logits_of(pair.runner, [row], copies=[(own_pages(0)[2], pages[2])])
    torch.testing.assert_close(found, pair.expected[0][cached:], rtol=0, atol=BOUND)


@pytest.mark.real
def test_mixed_batch(pair: Pair) -> None:
    """Rows that read one token, a chunk and a whole prompt, in one step; two share a prefix."""
    first, second = pair.prompts
    cut = 2 * PAGE
    logits_of(pair.runner, [Row(first[:-1], 0, own_pages(0)), Row(second[:cut], 0, own_pages(1))])
    rows = [
        Row(first[-1:], len(first) - 1, own_pages(0)),
        Row(second[cut : cut + 5], cut, own_pages(1)),
        Row(second, 0, own_pages(2)),
        Row(first[cut : cut + 1], cut, [*own_pages(0)[:2], *own_pages(3)]),
    ]
    expected = [
        pair.expected[0][-1:],
        pair.expected[1][cut : cut + 5],
        pair.expected[1],
        pair.expected[0][cut : cut + 1],
    ]
    torch.testing.assert_close(logits_of(pair.runner, rows), torch.cat(expected), rtol=0, atol=BOUND)


@pytest.mark.real
@pytest.mark.parametrize("tiny", [tiny for tiny in TINIES if tiny.label in (*FAMILIES, "gemma3")], ids=str)
def test_bfloat16_stays_near_float32(tiny: Tiny, tmp_path: Path) -> None:
    """Stored and computed in bfloat16: the error is a few of its roundings (2**-8), not a wrong answer."""
    model = tiny.save(tmp_path, torch.bfloat16).float()
    prompt = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(4)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    budget = Budget(cache_bytes=2**21, max_rows=4, page_size=PAGE, threads=1, dtype="bfloat16")
    runner = cpu.open(read_model(tmp_path), budget)
    assert isinstance(runner, TorchRunner)
    assert runner.kv.layer(0)[0].dtype == torch.bfloat16
    error = (logits_of(runner, [Row(prompt, 0, own_pages(0))]) - expected).std() / expected.std()
    assert error < 0.05


def test_every_architecture_has_a_file_a_config_and_a_tiny_model() -> None:
    assert set(architectures()) == set(FAMILIES) == {tiny.model_type for tiny in TINIES}
