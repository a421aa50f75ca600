"""guide, the built-in model, as GGUF: its log-probabilities against the torch runner, and its held-out questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from localllm.app import paths
from localllm.backends import cpu, llamacpp
from localllm.engine.engine import Engine
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.request import Request, Sampling, TokenLogprobs
from localllm.engine.runner import Runner, Unavailable
from scripts.train_guide import evaluate
from scripts.train_guide.chatml import END
from scripts.train_guide.corpus import HELDOUT

from . import gguf_models

if isinstance(llamacpp.probe(), Unavailable):
    pytest.skip("llama.cpp is not installed", allow_module_level=True)

pytestmark = pytest.mark.real

# Maximum and mean difference of log-probabilities. llama.cpp's cache is float16; q8_0 rounds activations to 8 bits too.
BOUNDS = {"F32": (0.03, 0.004), "F16": (0.03, 0.004), "Q8_0": (0.5, 0.08)}
COUNT = 40  # tokens
QUESTIONS = [
    "How do I stop the daemon?",
    "Write the numbers from 1 to 9.",
    "What is 17 + 25?",
    "Which command downloads a model?",
]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(paths.guide_dir() / "tokenizer.json"))


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_models.write_guide(tmp_path_factory.mktemp("guide") / "guide-F32.gguf")


def in_format(exact: Path, recipe: str) -> Path:
    return exact if recipe == "F32" else gguf_models.quantise(exact, exact.with_name(f"{recipe}.gguf"), recipe)


def opened(module: Callable[..., Runner], path: Path, rows: int = 4) -> Runner:
    return module(read_model(path), LoadOptions(context=2048, max_rows=rows, threads=1))


def answer(runner: Runner, prompts: Sequence[Sequence[int]], count: int) -> list[list[TokenLogprobs]]:
    engine = Engine(runner)
    result: list[list[TokenLogprobs]] = [[] for _ in prompts]
    stop = frozenset({tokenizer().token_to_id(END)})
    for index, prompt in enumerate(prompts):
        engine.submit(Request(str(index), tuple(prompt), count, Sampling(logprobs=5), stop_ids=stop))
    while engine.has_work:
        for delta in engine.step():
            result[int(delta.request_id)] += delta.logprobs
    return result


def chat(question: str) -> list[int]:
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(("recipe", "limit", "mean"), [(recipe, *bounds) for recipe, bounds in BOUNDS.items()])
def test_log_probabilities_are_those_of_the_torch_runner(exact: Path, recipe: str, limit: float, mean: float) -> None:
    prompts = [chat(question) for question in QUESTIONS]
    torch_runner = cpu.open(read_model(paths.guide_dir()), LoadOptions(context=2048, max_rows=4, dtype="float32"))
    expected = answer(torch_runner, prompts, COUNT)
    torch_runner.close()
    begun = [  # each prompt with the first tokens of its answer, up to all of them
        [*prompt, *(entry.token for entry in entries[:length])]
        for prompt, entries in zip(prompts, expected, strict=True)
        for length in range(len(entries))
    ]
    runner = opened(llamacpp.open, in_format(exact, recipe))
    actual = [entries[0] for entries in answer(runner, begun, 1)]
    runner.close()
    wanted = [entry for entries in expected for entry in entries]
    assert len(wanted) > 60
    differences = []
    for entry, other in zip(actual, wanted, strict=True):
        top = dict(other.top)
        differences += [abs(value - top[token]) for token, value in entry.top if token in top]
        margin = other.top[0][1] - other.top[1][1]
        assert entry.token == other.token or margin < limit
    assert max(differences) < limit
    assert float(np.mean(differences)) < mean


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", ["F16", "Q8_0", "Q4_K_M"])
def test_held_out_questions_are_answered_correctly(exact: Path, recipe: str) -> None:
    runner = opened(llamacpp.open, in_format(exact, recipe), rows=32)

    def texts(prompts: list[str]) -> list[str]:
        ids = [tokenizer().encode(prompt, add_special_tokens=False).ids for prompt in prompts]
        written = [[entry.token for entry in entries] for entries in answer(runner, ids, 200)]
        return list(tokenizer().decode_batch(written, skip_special_tokens=True))

    results = evaluate.run_dialogues(evaluate.load(HELDOUT), texts)
    runner.close()
    assert evaluate.report(results)["share"] >= evaluate.MIN_SHARE
