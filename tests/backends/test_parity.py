"""Teacher-forced logits of tiny random models against transformers, with prompts split into steps in several ways."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from localllm.backends import cpu
from localllm.backends.pytorch.models import architectures
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.files.families import FAMILIES
from localllm.engine.files.model_config import parse_config
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions

from . import shapes
from .batches import Row, make_batch
from .pages import PAGES
from .tiny import TINIES, VOCAB, Tiny, old_spelling

PAGE = 8
LENGTH = 45
BOUND = 1e-4


def logits_of(
    runner: TorchRunner,
    rows: Sequence[Row],
    copies: Sequence[tuple[int, int]] = (),
    state_copies: Sequence[tuple[int, int]] = (),
) -> torch.Tensor:
    """Logits of every token of the step [tokens, vocab]."""
    device = runner.device
    with torch.inference_mode():
        batch = make_batch(rows, runner.spec.vocab_size, copies, len(runner.spec.groups), state_copies)
        runner.copy(batch)
        step = runner.inputs.send(batch).step
        every = replace(step, last=torch.arange(batch.num_tokens, dtype=torch.int32))
        return runner.model.logits(runner.model(every, device.ops, runner.kv), device.ops)


@dataclass(frozen=True)
class Pair:
    """A runner, and the logits of transformers for two prompts, each [tokens, vocab]."""

    runner: TorchRunner
    prompts: list[list[int]]
    expected: list[torch.Tensor]


@pytest.fixture(scope="module", params=TINIES, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    tiny: Tiny = request.param
    folder = tmp_path_factory.mktemp(tiny.label)
    model = tiny.save(folder)
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(3, VOCAB, (2, tiny.length), generator=generator).tolist()
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    assert 0.5 < expected[0].std() < 50, "random weights should give logits that differ"
    budget = LoadOptions(
        context=tiny.context, cache_bytes=2**22, max_rows=12, max_step_tokens=256, page_size=PAGE, threads=1
    )
    runner = cpu.open(read_model(folder), budget)
    assert isinstance(runner, TorchRunner)
    return Pair(runner, prompts, expected)


def own_pages(row: int) -> range:
    return range(1 + row * 16, 17 + row * 16)


@pytest.mark.real
def test_whole_prompts(pair: Pair) -> None:
    rows = [Row(prompt, 0, own_pages(row), state=row) for row, prompt in enumerate(pair.prompts)]
    torch.testing.assert_close(logits_of(pair.runner, rows), torch.cat(pair.expected), rtol=0, atol=BOUND)


@pytest.mark.real
@pytest.mark.parametrize("chunk", [1, 3, 7, PAGE - 1, PAGE, PAGE + 1])
def test_chunks(pair: Pair, chunk: int) -> None:
    prompt = pair.prompts[0]
    parts = [
        logits_of(pair.runner, [Row(prompt[at : at + chunk], at, own_pages(0), state=2)])
        for at in range(0, len(prompt), chunk)
    ]
    torch.testing.assert_close(torch.cat(parts), pair.expected[0], rtol=0, atol=BOUND)


@pytest.mark.real
def test_shared_prefix(pair: Pair) -> None:
    """A second sequence reads pages of the first sequence, a page that the step copies, and a snapshot of the state."""
    prompt, cached = pair.prompts[0], 2 * PAGE + 3
    snapshot = pair.runner.spec.num_states
    logits_of(pair.runner, [Row(prompt[:cached], 0, own_pages(0), state=0)])
    logits_of(pair.runner, [Row(prompt[cached:], cached, own_pages(0), state=0)], state_copies=[(0, snapshot)])
    pages = [*own_pages(0)[:2], *own_pages(1)[:14]]
    row = Row(prompt[cached:], cached, pages, state=1)
    result = logits_of(pair.runner, [row], copies=[(own_pages(0)[2], pages[2])], state_copies=[(snapshot, 1)])
    torch.testing.assert_close(result, pair.expected[0][cached:], rtol=0, atol=BOUND)


@pytest.mark.real
def test_mixed_batch(pair: Pair) -> None:
    """A step with rows of one token, a chunk and a full prompt. Two rows share a prefix."""
    first, second = pair.prompts
    cut = 2 * PAGE
    logits_of(pair.runner, [Row(first[:cut], 0, own_pages(0), state=3), Row(second[:cut], 0, own_pages(1), state=1)])
    logits_of(pair.runner, [Row(first[cut:-1], cut, own_pages(0), state=3)], state_copies=[(3, 0)])
    rows = [
        Row(first[-1:], len(first) - 1, own_pages(0), state=3),
        Row(second[cut : cut + 5], cut, own_pages(1), state=1),
        Row(second, 0, own_pages(2), state=2),
        Row(first[cut : cut + 1], cut, [*own_pages(0)[:2], *own_pages(3)], state=0),
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
def test_bfloat16_is_near_float32(tiny: Tiny, tmp_path: Path) -> None:
    """Weights and activations in bfloat16: the error is a few roundings of bfloat16 (2**-8). With experts it is larger,
    because a rounded router chooses other experts for a few tokens."""
    model = tiny.save(tmp_path, torch.bfloat16).float()
    prompt = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(4)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    budget = LoadOptions(cache_bytes=2**21, max_rows=4, page_size=PAGE, threads=1, dtype="bfloat16")
    runner = cpu.open(read_model(tmp_path), budget)
    assert isinstance(runner, TorchRunner)
    assert runner.kv.cache.layers[0][0].dtype == torch.bfloat16
    error = (logits_of(runner, [Row(prompt, 0, own_pages(0), state=0)]) - expected).std() / expected.std()
    assert error < (0.2 if FAMILIES[tiny.model_type].moe else 0.05)


def near(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Log-probabilities."""
    torch.testing.assert_close(got.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=BOUND)


@pytest.mark.real
@pytest.mark.parametrize("shape", [*shapes.SHAPES, *PAGES], ids=str)
def test_odd_shapes(shape: Tiny, tmp_path: Path) -> None:
    """A full prompt, then a prompt in chunks with a decoded end, then a prompt with a cached prefix."""
    model, many = shape.save(tmp_path), -(-shape.length // PAGE)
    prompts = torch.randint(3, VOCAB, (2, shape.length), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.inference_mode():
        first, second = (model(torch.tensor([prompt])).logits[0] for prompt in prompts)
    budget = LoadOptions(
        context=shape.context, cache_bytes=2**25, max_rows=8, max_step_tokens=512, page_size=PAGE, threads=1
    )
    runner = cpu.open(read_model(tmp_path), budget)
    assert isinstance(runner, TorchRunner)
    pages, others = range(1, 1 + many), range(1 + many, 1 + 2 * many)
    near(logits_of(runner, [Row(prompts[0], 0, pages, state=0)]), first)
    cuts = [*range(0, shape.length - 5, 11), *range(shape.length - 5, shape.length + 1)]
    parts = [logits_of(runner, [Row(prompts[1][at:end], at, others, state=1)]) for at, end in pairwise(cuts)]
    near(torch.cat(parts), second)
    cached = shape.length // 2 // PAGE * PAGE
    hit = [*pages[: cached // PAGE], *others[cached // PAGE :]]
    near(logits_of(runner, [Row(prompts[0][cached:], cached, hit)]), first[cached:])


@pytest.mark.parametrize("shape", shapes.SHAPES, ids=str)
def test_both_rope_spellings_give_one_config(shape: Tiny) -> None:
    """transformers 5 writes rope_parameters, transformers 4 wrote rope_theta and rope_scaling."""
    values = shape.config().to_dict() | {"dtype": "float32"}
    older = deepcopy(values)
    old_spelling(older)
    assert parse_config(older) == parse_config(values)


def test_all_architectures_have_a_file_a_config_and_a_tiny_model() -> None:
    assert set(architectures()) == set(FAMILIES) == {written_type(tiny) for tiny in (*TINIES, *PAGES)}


def written_type(tiny: Tiny) -> str:
    """The model_type of the text model in the config.json of a tiny model."""
    values = tiny.config().to_dict() | {"dtype": "float32"}
    if tiny.rewrite:
        tiny.rewrite(values)
    return parse_config(values).model_type


def test_there_are_56_shapes() -> None:
    labels = [shape.label for shape in shapes.SHAPES]
    assert len(set(labels)) == len(labels) == 56
    assert set(shapes.SAMPLED) < set(labels)
