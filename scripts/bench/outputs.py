"""Outputs are checked before any timing counts: what a fast step gives must be what the slow one gives."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from types import ModuleType

import numpy as np
from shapes import Shape
from weights import stand_in

from localllm.engine.engine import Engine
from localllm.engine.modelfiles import read_model
from localllm.engine.request import Delta, Request, Sampling
from localllm.engine.runner import Backend, Budget, Runner

PAGE = 16
PROMPTS, TOP = 32, 20
LENGTHS = range(1 + PAGE, 2 + PROMPTS * PAGE, PAGE)  # each a token longer than whole pages
FORCED = 100.0  # a bias that no logit beats; log-probabilities are those before it

# Largest allowed mean and single difference of a log-probability, in nats, from the float32 references with the same
# weights. Random weights give logits of about 1; bfloat16 activations are off by a few thousandths of what they hold.
BOUNDS = {"bf16": (0.03, 0.3), "fp8": (0.05, 0.5), "int8": (0.05, 0.5), "int4": (0.06, 0.6)}

CANARY = Path(__file__).parents[2] / "tests" / "backends" / "canary.py"


class WrongOutput(Exception):
    """Nothing that follows may count."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Between log-probabilities, in nats."""

    mean: float
    most: float
    compared: int


def check(backend: Backend, shape: Shape, fmt: str, budget: Budget, layers: int) -> Difference:
    """Of the shape with so many layers (0: all of them). Raises WrongOutput beyond the bounds."""
    small = replace(shape, layers=layers or shape.layers)
    cache = sum(LENGTHS) * 2 * small.layers * small.kv_heads * small.head_dim * 4  # bytes, with room for bookkeeping
    asked = replace(
        budget, context=max(LENGTHS) + PAGE, max_rows=PROMPTS, max_step_tokens=2048, page_size=PAGE, cache_bytes=cache
    )
    exact = replace(asked, dtype="float32", reference_ops=("all",), graphs="off", cache_bytes=2 * cache)
    with tempfile.TemporaryDirectory() as folder:
        files = stand_in(small, Path(folder))
        meant, given = (_forced(backend.open(files, wanted), small.vocab) for wanted in (exact, asked))
    differences = np.array(
        [
            abs(one[token] - other[token])
            for one, other in zip(meant, given, strict=True)
            for token in one.keys() & other.keys()
        ]
    )
    found = Difference(float(differences.mean()), float(differences.max()), len(differences))
    mean, most = BOUNDS[fmt]
    if not (found.mean <= mean and found.most <= most):  # also where one is not a number
        raise WrongOutput(f"{small.name}, {fmt}: {found}, allowed are {mean} and {most} nats")
    return found


def _forced(runner: Runner, vocab: int) -> list[dict[int, float]]:
    """Log-probabilities of the token that had to come next, whatever the model, and of the likeliest ones: after
    prompts of which each is read as a whole, and again with all but its last token in the cache."""
    random = np.random.default_rng(1)
    prompts = [tuple(random.integers(0, vocab, length).tolist()) for length in LENGTHS]
    forced = [int(token) for token in random.integers(0, vocab, len(prompts))]
    engine, found = Engine(runner), []
    for turn in range(2):
        asked = [
            Request(f"{turn}.{at}", prompt, 1, Sampling(logprobs=TOP, logit_bias=((token, FORCED),)))
            for at, (prompt, token) in enumerate(zip(prompts, forced, strict=True))
        ]
        answers = _answers(engine, asked)
        for request in asked:
            (step,) = answers[request.id][0].logprobs
            found.append({**dict(step.top), step.token: step.logprob})
    engine.close()
    return found


def check_canary(backend: Backend, budget: Budget, rows: Sequence[int]) -> int:
    """The model whose every next token is known: at these numbers of rows, the second half joining later. How many
    tokens were checked; raises WrongOutput."""
    canary, checked, count = _canary(), 0, 40
    with tempfile.TemporaryDirectory() as folder:
        files = read_model(canary.save(Path(folder)))
        runner = backend.open(files, replace(budget, context=256, max_rows=max(rows), quant="none"))
        engine = Engine(runner)
        for together in rows:
            lengths = [canary.BACK + 2 + 3 * at % 90 for at in range(together)]
            prompts = [canary.prompt(at % canary.KEYS, length, together + at) for at, length in enumerate(lengths)]
            asked = [Request(f"{together}.{at}", tuple(prompt), count) for at, prompt in enumerate(prompts)]
            answers = _answers(engine, asked[::2], asked[1::2])
            for request, prompt in zip(asked, prompts, strict=True):
                tokens = [token for delta in answers[request.id] for token in delta.tokens]
                if tokens != canary.walk(prompt, count):
                    raise WrongOutput(f"the canary model, request {request.id}: {tokens}")
                checked += count
        engine.close()
    return checked


def check_guide(backend: Backend, budget: Budget) -> int:
    """The built-in model in float32 answers token by token as its references do. How many tokens were checked."""
    from tokenizers import Tokenizer

    files = read_model(str(resources.files("localllm.assets") / "guide"), "guide")
    tokenizer = Tokenizer.from_file(str(files.path / "tokenizer.json"))
    subjects = ("a model", "the daemon", "my GPU", "an adapter", "the cache", "JSON", "a port", "two numbers")
    chats = [f"<|im_start|>user\nHow do I use {what}?<|im_end|>\n<|im_start|>assistant\n" for what in subjects]
    asked = [Request(str(at), tuple(tokenizer.encode(chat).ids), 48) for at, chat in enumerate(chats)]
    exact = replace(budget, context=256, max_rows=len(asked), dtype="float32", quant="none")
    texts = []
    for wanted in (exact, replace(exact, reference_ops=("all",), graphs="off")):
        engine = Engine(backend.open(files, wanted))
        answers = _answers(engine, asked)
        texts.append({name: [token for delta in deltas for token in delta.tokens] for name, deltas in answers.items()})
        engine.close()
    if texts[0] != texts[1]:
        raise WrongOutput("guide answers differently from its references")
    return sum(map(len, texts[0].values()))


def _answers(engine: Engine, first: Sequence[Request], later: Sequence[Request] = ()) -> dict[str, list[Delta]]:
    """All that came, by request; those of `later` join after a few steps."""
    found: dict[str, list[Delta]] = {request.id: [] for request in (*first, *later)}
    for request in first:
        engine.submit(request)
    waiting, steps = list(later), 0
    while engine.has_work or waiting:
        for delta in engine.step():
            found[delta.request_id].append(delta)
        steps += 1
        if steps == 5:
            for request in waiting:
                engine.submit(request)
            waiting = []
    return {name: [delta for delta in deltas if delta.tokens] for name, deltas in found.items()}


def _canary() -> ModuleType:
    """From the tests, which are no package."""
    spec = importlib.util.spec_from_file_location("canary", CANARY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
