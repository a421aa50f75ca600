"""Outputs are checked before any timing counts: what a fast step gives must be what the slow one gives."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from shapes import Shape
from weights import first_layers

from localllm.engine.engine import Engine
from localllm.engine.modelfiles import ModelFiles, read_model
from localllm.engine.options import Graphs, LoadOptions
from localllm.engine.request import Delta, Request, Sampling
from localllm.engine.runner import Backend, Runner

PAGE = 16  # or a divisor of it
PROMPTS, TOP = 32, 20
LENGTHS = range(1 + PAGE, 2 + PROMPTS * PAGE, PAGE)  # each a token longer than whole pages
FORCED = 100.0  # a bias that no logit beats; log-probabilities are those before it

ANSWER = 40  # tokens
SUBJECTS = ("a model", "the daemon", "my GPU", "an adapter", "the cache", "JSON", "a port", "two numbers")
PLAIN: Mapping[str, Any] = {"dtype": "float32", "cache_dtype": "auto", "reference_ops": ("all",), "graphs": "off"}

# Largest allowed mean and single difference of a log-probability, in nats, from the float32 references with the same
# weights. Random weights give logits of about 1; bfloat16 activations are off by a few thousandths of what they hold.
BOUNDS = {"bf16": (0.03, 0.3), "fp8": (0.05, 0.5), "int8": (0.05, 0.5), "int4": (0.06, 0.6)}
FP8_CACHE = (0.1, 1.0)  # keys and values have three bits after the first

CANARY = Path(__file__).parents[2] / "tests" / "backends" / "canary.py"


class WrongOutput(Exception):
    """Nothing that follows may count."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Between log-probabilities, in nats."""

    mean: float
    most: float
    compared: int


class Checks:
    """Of one shape with so many layers (0: all of them) in one format; what is right is found out once for all ways."""

    def __init__(
        self, backend: Backend, shape: Shape, files: ModelFiles, fmt: str, budget: LoadOptions, layers: int = 0
    ) -> None:
        self.layers = min(layers or shape.layers, shape.layers)
        self._backend, self._fmt, self._budget = backend, fmt, budget
        self._shape = replace(shape, layers=self.layers)
        self._files = first_layers(files, self._shape)
        self._meant: list[dict[int, float]] = []
        self._guide: dict[str, list[int]] = {}

    def log_probabilities(self, graphs: Graphs) -> Difference:
        """Raises WrongOutput beyond the bounds."""
        self._meant = self._meant or self._given(replace(self._budget, **PLAIN))
        given = self._given(replace(self._budget, graphs=graphs))
        pairs = zip(self._meant, given, strict=True)
        apart = np.array(
            [abs(one[token] - other[token]) for one, other in pairs for token in one.keys() & other.keys()]
        )
        found = Difference(float(apart.mean()), float(apart.max()), len(apart))
        mean, most = FP8_CACHE if self._budget.cache_dtype == "fp8" else BOUNDS[self._fmt]
        if not (found.mean <= mean and found.most <= most):  # also where one is not a number
            raise WrongOutput(f"{self._shape.name}, {self._fmt}: {found}, allowed are {mean} and {most} nats")
        return found

    def canary(self, graphs: Graphs, rows: Sequence[int]) -> int:
        """The model whose every next token is known: at these numbers of rows, the second half joining later. How many
        tokens were checked; raises WrongOutput."""
        canary, checked = _canary(), 0
        exact = replace(self._budget, cache_dtype="auto", quant="none")
        budget = replace(exact, graphs=graphs, context=256, max_rows=max(rows))
        with tempfile.TemporaryDirectory() as folder:
            engine = Engine(self._backend.open(read_model(canary.save(Path(folder))), budget))
        for together in rows:
            lengths = [canary.BACK + 2 + 3 * at % 90 for at in range(together)]
            prompts = [canary.prompt(at % canary.KEYS, length, together + at) for at, length in enumerate(lengths)]
            asked = [Request(f"{together}.{at}", tuple(prompt), ANSWER) for at, prompt in enumerate(prompts)]
            for name, tokens in _tokens(_answers(engine, asked[::2], asked[1::2])).items():
                prompt = prompts[int(name.partition(".")[2])]
                if tokens != canary.walk(prompt, ANSWER):
                    raise WrongOutput(f"the canary model, request {name}: {tokens}")
                checked += len(tokens)
        engine.close()
        return checked

    def guide(self, graphs: Graphs) -> int:
        """The built-in model in float32 answers token by token as its references do. How many tokens were checked;
        raises WrongOutput."""
        self._guide = self._guide or self._guided(replace(self._budget, **PLAIN))
        budget = replace(self._budget, graphs=graphs, dtype="float32", cache_dtype="auto")
        if self._guided(budget) != self._guide:
            raise WrongOutput("guide answers differently from its references")
        return sum(map(len, self._guide.values()))

    def _given(self, budget: LoadOptions) -> list[dict[int, float]]:
        shape = self._shape
        room = replace(
            budget,
            context=max(LENGTHS) + PAGE,
            max_rows=PROMPTS,
            max_step_tokens=2048,
            cache_bytes=2 * sum(LENGTHS) * 2 * shape.layers * shape.kv_heads * shape.head_dim * 4,
        )
        return _forced(self._backend.open(self._files, room), shape.vocab)

    def _guided(self, budget: LoadOptions) -> dict[str, list[int]]:
        from tokenizers import Tokenizer

        files = read_model(str(resources.files("localllm.assets") / "guide"), "guide")
        tokenizer = Tokenizer.from_file(str(files.path / "tokenizer.json"))
        chats = [f"<|im_start|>user\nHow do I use {what}?<|im_end|>\n<|im_start|>assistant\n" for what in SUBJECTS]
        asked = [
            Request(what, tuple(tokenizer.encode(chat).ids), ANSWER) for what, chat in zip(SUBJECTS, chats, strict=True)
        ]
        engine = Engine(self._backend.open(files, replace(budget, context=256, max_rows=len(asked), quant="none")))
        found = _tokens(_answers(engine, asked))
        engine.close()
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


def _tokens(answers: Mapping[str, Sequence[Delta]]) -> dict[str, list[int]]:
    return {name: [token for delta in deltas for token in delta.tokens] for name, deltas in answers.items()}


def _canary() -> ModuleType:
    """From the tests, which are no package."""
    spec = importlib.util.spec_from_file_location("canary", CANARY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
