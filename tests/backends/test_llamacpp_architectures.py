"""The engine on llama.cpp gives the tokens and log-probabilities of llama_decode, for all architectures and formats.

The models are tiny and random. make test has a sample, in which each architecture and each format occurs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.backends import llamacpp
from localllm.backends.llamacpp.opening import SNAPSHOT_INTERVAL, can_repack
from localllm.engine.engine import Engine
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.request import Request, Sampling, TokenLogprobs
from localllm.engine.runner import Runner, Unavailable

from .gguf_random import ARCHITECTURES, HYBRID, LATENT, RECIPES, RECURRENT, VOCAB, write_random

if isinstance(llamacpp.probe(), Unavailable):
    pytest.skip("llama.cpp is not installed", allow_module_level=True)

from .llama_decode import Reference, loaded

pytestmark = pytest.mark.real

COUNT = 20  # tokens of an answer
LENGTHS = (5, 40, 70)  # tokens of prompts, shorter and longer than a window
TOP = 5
EXACT = 2e-4  # difference of log-probabilities from another order of sums
ROUNDED = 0.5  # the same beside other rows, where activations are rounded to 8 bits in another place
MEAN = 0.05  # maximum mean of such differences; also for latent attention without other rows


def is_sampled(architecture: int, recipe: int) -> bool:
    return architecture % len(RECIPES) == recipe or (architecture, recipe) == (0, 0)


CASES = [
    pytest.param(architecture, recipe, marks=() if is_sampled(row, column) else pytest.mark.slow)
    for row, architecture in enumerate(ARCHITECTURES)
    for column, recipe in enumerate(RECIPES)
]


def opened(file: Path) -> Runner:
    return llamacpp.open(read_model(file), LoadOptions(context=256, max_rows=4, threads=1))


def prompt(length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(length).integers(0, VOCAB - 4, length).tolist())


def answers(runner: Runner, lengths: tuple[int, ...]) -> dict[int, list[TokenLogprobs]]:
    """The answers to prompts of these lengths, which start one step after another."""
    engine = Engine(runner)
    result: dict[int, list[TokenLogprobs]] = {length: [] for length in lengths}
    waiting = list(lengths)
    while waiting or engine.has_work:
        if waiting:
            length = waiting.pop()
            engine.submit(Request(str(length), prompt(length), COUNT, Sampling(logprobs=TOP)))
        for delta in engine.step():
            result[int(delta.request_id)] += delta.logprobs
    return result


def chunk(architecture: str, length: int) -> int:
    """The number of tokens in the first step of a prompt: those before its last snapshot, if there are snapshots."""
    has_snapshots = architecture in RECURRENT | HYBRID
    return (length - 1) // SNAPSHOT_INTERVAL * SNAPSHOT_INTERVAL if has_snapshots else 0


def expected(reference: Reference, length: int, first: int, tokens: list[int]) -> NDArray[np.float64]:
    """Log-probabilities [answer, vocab] at each position of an answer. `first`: number of tokens in the first step."""
    if first:
        reference.logits(prompt(length)[:first])
    rows = [reference.logits(prompt(length)[first:], only_last=True)[-1]]
    rows += [reference.logits([token])[0] for token in tokens[:-1]]
    logits = np.stack(rows).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def differences(answer: list[TokenLogprobs], logprobs: NDArray[np.float64]) -> NDArray[np.float64]:
    """The differences of all listed log-probabilities, and of each drawn token from the likeliest one."""
    assert len(answer) == COUNT
    result = []
    for entry, row in zip(answer, logprobs, strict=True):
        result += [entry.logprob - row[entry.token], row.max() - row[entry.token]]
        result += [logprob - row[token] for token, logprob in entry.top]
    return np.abs(result)


@pytest.mark.parametrize(("architecture", "recipe"), CASES)
def test_answers_are_those_of_llama_decode(tmp_path: Path, architecture: str, recipe: str) -> None:
    file = write_random(tmp_path, architecture, recipe)
    runner = opened(file)
    together = answers(runner, LENGTHS)
    with loaded(file, repack=can_repack(read_model(file))) as model:
        for length in LENGTHS:
            reference = Reference(model)
            alone = answers(opened(file), (length,))[length]
            tokens = [entry.token for entry in alone]
            first = chunk(architecture, length)
            logprobs = expected(reference, length, first, tokens)
            assert tokens == logprobs.argmax(-1).tolist()
            assert differences(alone, logprobs).max() < (MEAN if architecture in LATENT else EXACT)
            reference.close()
            reference = Reference(model)
            beside = together[length]
            apart = differences(beside, expected(reference, length, first, [entry.token for entry in beside]))
            assert apart.max() < ROUNDED
            assert apart.mean() < MEAN
            reference.close()
    runner.close()
