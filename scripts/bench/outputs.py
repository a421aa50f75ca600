"""A program (programs.py): checks outputs before any timing. Log-probabilities of fast steps must be close to those of
the references.

Settings: model (a name in SHAPES), folder (for random weights), backend, quant, layers (the first ones of the shape).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from programs import Answer, serve, settings
from shapes import SHAPES, Shape
from weights import first_layers, stand_in

from localllm import backends
from localllm.engine.engine import Engine
from localllm.engine.files.model_files import ModelFiles
from localllm.engine.files.quantization import Quant
from localllm.engine.options import LoadOptions
from localllm.engine.request import Request, Sampling
from localllm.engine.runner import Backend, Runner

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


def compare(backend: Backend, shape: Shape, files: ModelFiles, quant: Quant) -> Answer:
    """The differences of log-probabilities from the references. Raises WrongOutput if one is larger than BOUNDS."""
    cache_bytes = 16 * sum(LENGTHS) * shape.layers * shape.kv_heads * shape.head_dim
    cache_bytes += 4 * PROMPTS * files.config.state_bytes
    options = LoadOptions(
        quant=quant, context=max(LENGTHS) + PAGE, max_rows=PROMPTS, max_step_tokens=2048, cache_bytes=cache_bytes
    )
    plain = replace(options, dtype="float32", ops=("all=reference",), graphs="off")
    expected = log_probabilities(backend.open(files, plain), shape.vocab)
    actual = log_probabilities(backend.open(files, options), shape.vocab)
    differences = [abs(expected[key] - actual[key]) for key in expected.keys() & actual.keys()]
    mean, largest = float(np.mean(differences)), float(np.max(differences))
    if not (mean <= BOUNDS[quant][0] and largest <= BOUNDS[quant][1]):  # NaN is wrong as well
        raise WrongOutput(f"log-probabilities differ by {mean} and {largest} nats, allowed: {BOUNDS[quant]}")
    return {"mean": 1e3 * mean, "largest": 1e3 * largest, "compared": len(differences)}


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


def main(model: str, folder: str, backend: str, quant: Quant, layers: int) -> Answer:
    shape = replace(SHAPES[model], layers=min(layers, SHAPES[model].layers))
    files = first_layers(stand_in(SHAPES[model], Path(folder)), shape)
    choice = backends.choose(backend, files)
    device = "" if choice.info.main_memory else choice.info.name
    return {"device": device, **compare(choice.backend, shape, files, quant)}


if __name__ == "__main__":
    serve(main(**settings(__doc__)), main)
