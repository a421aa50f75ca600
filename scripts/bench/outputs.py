"""Checks of outputs before any timing: the outputs of fast steps must equal those of the references."""

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
from localllm.engine.files.model_files import ModelFiles, read_model
from localllm.engine.options import Graphs, LoadOptions
from localllm.engine.request import Delta, Request, Sampling
from localllm.engine.runner import Backend, Runner

PAGE = 16  # a multiple of the page size
PROMPTS = 32
TOP = 20
LENGTHS = range(1 + PAGE, 2 + PROMPTS * PAGE, PAGE)  # each has one token more than fits full pages
FORCED = 100.0  # larger than any logit; log-probabilities do not include the bias

ANSWER = 40  # tokens
SUBJECTS = ("a model", "the daemon", "my GPU", "an adapter", "the cache", "JSON", "a port", "two numbers")
PLAIN: Mapping[str, Any] = {"dtype": "float32", "cache_dtype": "auto", "reference_ops": ("all",), "graphs": "off"}

# Largest allowed mean and single difference of a log-probability, in nats, from the float32 references with the same
# weights. Random weights give logits of about 1; the relative error of bfloat16 activations is a few thousandths.
BOUNDS = {"bf16": (0.03, 0.3), "fp8": (0.05, 0.5), "fp8_w8a8": (0.05, 0.5), "int8": (0.05, 0.5), "int4": (0.06, 0.6)}
FP8_CACHE = (0.1, 1.0)  # keys and values have three bits of mantissa

CANARY = Path(__file__).parents[2] / "tests" / "backends" / "canary.py"


class WrongOutput(Exception):
    """An output is wrong; timings of this program do not count."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between log-probabilities, in nats."""

    mean: float
    max: float
    compared: int


class Checks:
    """Checks of one shape, with its first `layers` layers (0: all), in one format. References are computed once."""

    def __init__(
        self, backend: Backend, shape: Shape, files: ModelFiles, fmt: str, budget: LoadOptions, layers: int = 0
    ) -> None:
        self.layers = min(layers or shape.layers, shape.layers)
        self._backend = backend
        self._fmt = fmt
        self._budget = budget
        self._shape = replace(shape, layers=self.layers)
        self._files = first_layers(files, self._shape)
        self._expected: list[dict[int, float]] = []
        self._guide: dict[str, list[int]] = {}

    def log_probabilities(self, graphs: Graphs) -> Difference:
        """The difference from the references. Raises WrongOutput if it is larger than BOUNDS."""
        self._expected = self._expected or self._log_probabilities(replace(self._budget, **PLAIN))
        actual = self._log_probabilities(replace(self._budget, graphs=graphs))
        differences: list[float] = []
        for expected, answer in zip(self._expected, actual, strict=True):
            differences += [abs(expected[token] - answer[token]) for token in expected.keys() & answer.keys()]
        difference = Difference(float(np.mean(differences)), float(np.max(differences)), len(differences))
        mean, maximum = FP8_CACHE if self._budget.cache_dtype == "fp8" else BOUNDS[self._fmt]
        if not (difference.mean <= mean and difference.max <= maximum):  # NaN is wrong as well
            raise WrongOutput(f"{self._shape.name}, {self._fmt}: {difference}, allowed are {mean} and {maximum} nats")
        return difference

    def canary(self, graphs: Graphs, rows: Sequence[int]) -> int:
        """Check all tokens of the canary model at these numbers of rows; half of the rows join later.

        Returns the number of tokens. Raises WrongOutput."""
        canary = _canary()
        checked = 0
        exact = replace(self._budget, cache_dtype="auto", quant="none")
        budget = replace(exact, graphs=graphs, context=256, max_rows=max(rows))
        with tempfile.TemporaryDirectory() as folder:
            engine = Engine(self._backend.open(read_model(canary.save(Path(folder))), budget))
        for together in rows:
            prompts: list[list[int]] = []
            for row in range(together):
                length = canary.BACK + 2 + 3 * row % 90
                prompts.append(canary.prompt(row % canary.KEYS, length, together + row))
            requests = [Request(f"{together}.{row}", tuple(prompt), ANSWER) for row, prompt in enumerate(prompts)]
            for name, tokens in _tokens(_answers(engine, requests[::2], requests[1::2])).items():
                prompt = prompts[int(name.partition(".")[2])]
                if tokens != canary.walk(prompt, ANSWER):
                    raise WrongOutput(f"the canary model, request {name}: {tokens}")
                checked += len(tokens)
        engine.close()
        return checked

    def guide(self, graphs: Graphs) -> int:
        """Compare the answers of the built-in model in float32 with those of the references, token by token.

        Returns the number of tokens. Raises WrongOutput."""
        self._guide = self._guide or self._guide_answers(replace(self._budget, **PLAIN))
        budget = replace(self._budget, graphs=graphs, dtype="float32", cache_dtype="auto")
        if self._guide_answers(budget) != self._guide:
            raise WrongOutput("guide answers differently from its references")
        return sum(map(len, self._guide.values()))

    def _log_probabilities(self, budget: LoadOptions) -> list[dict[int, float]]:
        shape = self._shape
        room = replace(
            budget,
            context=max(LENGTHS) + PAGE,
            max_rows=PROMPTS,
            max_step_tokens=2048,
            cache_bytes=2 * sum(LENGTHS) * 2 * shape.layers * shape.kv_heads * shape.head_dim * 4,
        )
        return _forced(self._backend.open(self._files, room), shape.vocab)

    def _guide_answers(self, budget: LoadOptions) -> dict[str, list[int]]:
        from tokenizers import Tokenizer

        files = read_model(str(resources.files("localllm.assets") / "guide"), "guide")
        tokenizer = Tokenizer.from_file(str(files.path / "tokenizer.json"))
        chats = [
            f"<|im_start|>user\nHow do I use {subject}?<|im_end|>\n<|im_start|>assistant\n" for subject in SUBJECTS
        ]
        requests = [
            Request(subject, tuple(tokenizer.encode(chat).ids), ANSWER)
            for subject, chat in zip(SUBJECTS, chats, strict=True)
        ]
        engine = Engine(self._backend.open(files, replace(budget, context=256, max_rows=len(requests), quant="none")))
        answers = _tokens(_answers(engine, requests))
        engine.close()
        return answers


def _forced(runner: Runner, vocab: int) -> list[dict[int, float]]:
    """For each prompt: the log-probabilities of a forced next token and of the likeliest tokens.

    Each prompt runs twice: first computed in full, then with all but its last token from the cache."""
    random = np.random.default_rng(1)
    prompts = [tuple(random.integers(0, vocab, length).tolist()) for length in LENGTHS]
    forced = [int(token) for token in random.integers(0, vocab, len(prompts))]
    engine = Engine(runner)
    log_probabilities: list[dict[int, float]] = []
    for repetition in range(2):
        requests: list[Request] = []
        for prompt, token in zip(prompts, forced, strict=True):
            sampling = Sampling(logprobs=TOP, logit_bias=((token, FORCED),))
            requests.append(Request(f"{repetition}.{len(requests)}", prompt, 1, sampling))
        answers = _answers(engine, requests)
        for request in requests:
            (step,) = answers[request.id][0].logprobs
            log_probabilities.append({**dict(step.top), step.token: step.logprob})
    engine.close()
    return log_probabilities


def _answers(engine: Engine, first: Sequence[Request], later: Sequence[Request] = ()) -> dict[str, list[Delta]]:
    """The deltas with tokens of each request. The requests in `later` join after a few steps."""
    deltas: dict[str, list[Delta]] = {request.id: [] for request in (*first, *later)}
    for request in first:
        engine.submit(request)
    waiting = list(later)
    steps = 0
    while engine.has_work or waiting:
        for delta in engine.step():
            if delta.tokens:
                deltas[delta.request_id].append(delta)
        steps += 1
        if steps == 5:
            for request in waiting:
                engine.submit(request)
            waiting = []
    return deltas


def _tokens(answers: Mapping[str, Sequence[Delta]]) -> dict[str, list[int]]:
    return {name: [token for delta in deltas for token in delta.tokens] for name, deltas in answers.items()}


def _canary() -> ModuleType:
    """The module of the canary model. It is among the tests, which are no package."""
    spec = importlib.util.spec_from_file_location("canary", CANARY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
