"""Accuracy of quantised weights: mean KL divergence of next-token probabilities from those of the same model in bf16.

`python scripts/bench/quality.py [--shape qwen3-0.6b]`: the built-in model on its held-out questions, with the share of
correct answers (`peer_right`: in bf16); shapes of random weights on random tokens. Activations are float32.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rows import Row, among, parser, row, save
from run_localllm import open_files
from shapes import SHAPES
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from localllm.app import paths
from localllm.backends import cpu
from localllm.backends.pytorch.inputs import Step
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.engine import Engine
from localllm.engine.files.model_files import ModelFiles
from localllm.engine.files.quantization import Quant
from localllm.engine.options import LoadOptions
from localllm.engine.request import Request
from localllm.kernels.ops.attention import Rows
from scripts.train_guide import evaluate

QUANTS: tuple[Quant, ...] = ("int8", "int4", "fp8")
CONVERSATIONS = 150
RANDOM_TEXTS = 4
LENGTH = 128
CONTEXT = 2048
PAGE = 16
MAX_ANSWER = 200  # tokens


def opened(files: ModelFiles, quant: Quant) -> TorchRunner:
    budget = LoadOptions(context=CONTEXT, max_rows=32, page_size=PAGE, dtype="float32", quant=quant)
    runner = cpu.open(files, budget)
    assert isinstance(runner, TorchRunner)
    return runner


@torch.inference_mode()
def log_probabilities(runner: TorchRunner, tokens: list[int]) -> torch.Tensor:
    """[tokens - 1, vocab] log-probabilities of the next token."""
    count = len(tokens)
    ops = runner.device.ops
    positions = torch.arange(count, dtype=torch.int32)
    pages = torch.arange(1, -(-count // PAGE) + 1, dtype=torch.int32).unsqueeze(0)
    ends = torch.tensor([0, count], dtype=torch.int32)
    rows = Rows(ends, ends[1:], pages, (count,), (count,))
    slots = positions.long() + PAGE
    step = Step(torch.tensor(tokens, dtype=torch.int32), positions, slots, positions[:-1], rows)
    return runner.model.logits(runner.model(step, ops, runner.kv), ops).log_softmax(-1)


def compare(exact: TorchRunner, small: TorchRunner, texts: Sequence[list[int]]) -> dict[str, float]:
    """Means over all positions: KL divergence in nats, and the share of equal likeliest tokens."""
    divergence = agreed = tokens = 0.0
    for text in texts:
        expected, actual = log_probabilities(exact, text), log_probabilities(small, text)
        divergence += (expected.exp() * (expected - actual)).sum().item()
        agreed += (expected.argmax(-1) == actual.argmax(-1)).sum().item()
        tokens += len(expected)
    return {"kl": divergence / tokens, "agreed": agreed / tokens, "tokens": tokens}


def answers(runner: TorchRunner, tokenizer: Tokenizer) -> list[evaluate.Result]:
    """The greedy answers of guide to its held-out questions."""
    end = tokenizer.token_to_id(evaluate.END)

    def answer(prompts: list[str]) -> list[str]:
        written: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
        engine = Engine(runner)
        for name, prompt in zip(written, prompts, strict=True):
            ids = tuple(tokenizer.encode(prompt, add_special_tokens=False).ids)
            engine.submit(Request(name, ids, MAX_ANSWER, stop_ids=frozenset({end})))
        while engine.has_work:
            for delta in engine.step():
                written[delta.request_id] += delta.tokens
        return tokenizer.decode_batch(list(written.values()), skip_special_tokens=True)

    return evaluate.run_dialogues(evaluate.load(evaluate.HELDOUT), answer)


def guide_rows() -> Iterator[Row]:
    tokenizer = Tokenizer.from_file(str(paths.guide_dir() / "tokenizer.json"))
    files = open_files("guide", Path())
    exact = opened(files, "none")
    results = answers(exact, tokenizer)
    right = evaluate.report(results)["share"]
    conversations = []
    for result in [result for result in results if len(result.question.turns) == 1][:CONVERSATIONS]:
        messages = [("user", result.question.turns[0]), ("assistant", result.answer)]
        text = evaluate.render([{"role": role, "content": content} for role, content in messages])
        conversations.append(tokenizer.encode(text, add_special_tokens=False).ids)
    for quant in QUANTS:
        small = opened(files, quant)
        share = evaluate.report(answers(small, tokenizer))["share"]
        figures = compare(exact, small, conversations) | {"right": share, "peer_right": right}
        small.close()
        yield _row(f"guide, {quant}", figures)


def random_rows(name: str) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        files = open_files(name, Path(folder))
        exact = opened(files, "none")
        random = torch.Generator().manual_seed(1)
        texts = torch.randint(exact.spec.vocab_size, (RANDOM_TEXTS, LENGTH), generator=random).tolist()
        for quant in QUANTS:
            small = opened(files, quant)
            yield _row(f"{SHAPES[name].name}, {quant}", compare(exact, small, texts))
            small.close()


def _row(name: str, figures: dict[str, float]) -> Row:
    divergence = round(figures.pop("kl"), 5)
    return row(name, 0.0, "nats per token", **figures) | {"ours": divergence}


if __name__ == "__main__":
    arguments = parser(__doc__, "quality")
    arguments.add_argument("--shape", type=among(*SHAPES), default=[], help="shapes of random weights")
    options = arguments.parse_args()
    save(options.save, guide_rows())
    for name in options.shape:
        save(options.save, random_rows(name))
