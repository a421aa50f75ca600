"""A check of outputs before any timing: log-probabilities of fast steps must be close to those of the references."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from rows import Row, row
from shapes import Shape
from weights import first_layers

from localllm.backends import Choice
from localllm.engine.engine import Engine
from localllm.engine.files.model_files import ModelFiles
from localllm.engine.files.quantization import Quant
from localllm.engine.options import LoadOptions
from localllm.engine.request import Request, Sampling
from localllm.engine.runner import Runner

PAGE = 16  # a multiple of the page size
PROMPTS = 32
TOP = 20
LENGTHS = range(1 + PAGE, 2 + PROMPTS * PAGE, PAGE)  # each has one token more than fits full pages
FORCED = 100.0  # larger than any logit; log-probabilities do not include the bias

# Largest allowed mean and single difference of a log-probability, in nats, from the float32 references with the same
# weights. Random weights give logits of about 1; the relative error of bfloat16 activations is a few thousandths.
BOUNDS = {"none": (0.03, 0.3), "fp8": (0.05, 0.5), "fp8_w8a8": (0.05, 0.5), "int8": (0.05, 0.5), "int4": (0.06, 0.6)}


class WrongOutput(Exception):
    """An output is wrong, so timings mean nothing."""


def check(choice: Choice, shape: Shape, files: ModelFiles, quant: Quant, layers: int, title: str) -> Iterator[Row]:
    """The difference of log-probabilities from the references, with the first layers of the shape. Raises
    WrongOutput if it is larger than BOUNDS."""
    small = replace(shape, layers=min(layers, shape.layers))
    subset = first_layers(files, small)
    cache_bytes = 16 * sum(LENGTHS) * small.layers * small.kv_heads * small.head_dim
    options = LoadOptions(
        quant=quant, context=max(LENGTHS) + PAGE, max_rows=PROMPTS, max_step_tokens=2048, cache_bytes=cache_bytes
    )
    plain = replace(options, dtype="float32", reference_ops=("all",), graphs="off")
    expected = log_probabilities(choice.backend.open(subset, plain), small.vocab)
    actual = log_probabilities(choice.backend.open(subset, options), small.vocab)
    differences = [abs(expected[key] - actual[key]) for key in expected.keys() & actual.keys()]
    mean, largest = float(np.mean(differences)), float(np.max(differences))
    if not (mean <= BOUNDS[quant][0] and largest <= BOUNDS[quant][1]):  # NaN is wrong as well
        raise WrongOutput(f"{title}: log-probabilities differ by {mean} and {largest} nats, allowed: {BOUNDS[quant]}")
    device = "" if choice.info.main_memory else choice.info.name
    name = f"{title}, log-probabilities against float32 references"
    yield row(name, 1e3 * mean, "millinats", device=device, most=1e3 * largest, compared=len(differences))


def log_probabilities(runner: Runner, vocab: int) -> dict[tuple[str, int], float]:
    """(prompt, token) -> log-probability of a forced next token, and of the likeliest tokens.

    Each prompt runs twice: first computed in full, then with all but its last token from the cache."""
    random = np.random.default_rng(1)
    prompts = [tuple(random.integers(0, vocab, length).tolist()) for length in LENGTHS]
    forced = random.integers(0, vocab, len(prompts)).tolist()
    engine = Engine(runner)
    result: dict[tuple[str, int], float] = {}
    for repetition in range(2):
        for number, (prompt, token) in enumerate(zip(prompts, forced, strict=True)):
            sampling = Sampling(logprobs=TOP, logit_bias=((token, FORCED),))
            engine.submit(Request(f"{repetition}.{number}", prompt, 1, sampling))
        while engine.has_work:
            for delta in engine.step():
                for step in delta.logprobs:
                    listed = [*step.top, (step.token, step.logprob)]
                    result |= {(delta.request_id, token): logprob for token, logprob in listed}
    engine.close()
    missing = 2 * len(prompts) - len({name for name, _ in result})
    assert not missing, f"{missing} prompts have no log-probabilities"
    return result
