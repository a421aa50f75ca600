"""Accuracy of quantised weights: mean KL divergence and perplexity against the same model in bf16.

`python scripts/bench/quality.py [MODEL FOLDER …]`: the built-in model on conversations of an unused seed and on its
held-out questions; each folder on random tokens, without perplexity, as a model with random weights predicts nothing.
Activations are float32; the peer is bf16.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rows import Row, parser, row, save
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from localllm.app import paths
from localllm.backends import cpu
from localllm.backends.pytorch.inputs import Step
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.engine import Engine
from localllm.engine.files.model_files import read_model
from localllm.engine.files.quantization import Quant
from localllm.engine.options import LoadOptions
from localllm.engine.request import Request
from localllm.kernels.ops.attention import Rows
from scripts.train_guide import evaluate
from scripts.train_guide.chatml import ASSISTANT, END
from scripts.train_guide.corpus import HELDOUT
from scripts.train_guide.dataset import answers, texts
from scripts.train_guide.facts import Facts

QUANTS: tuple[Quant, ...] = ("int8", "int4", "fp8")
FACTS = Path(evaluate.__file__).with_name("facts.json")
UNUSED_SEED = 987_654  # no training run used it
CONVERSATIONS = 150
RANDOM_TEXTS = 4
LENGTH = 128
CONTEXT = 2048
PAGE = 16
MAX_ANSWER = 200  # tokens


class Text(NamedTuple):
    """Tokens, and the positions whose next-token probabilities are compared."""

    tokens: list[int]
    compared: torch.Tensor  # [tokens - 1] bool


def opened(folder: Path, quant: Quant) -> TorchRunner:
    budget = LoadOptions(context=CONTEXT, max_rows=32, page_size=PAGE, dtype="float32", quant=quant)
    runner = cpu.open(read_model(folder), budget)
    assert isinstance(runner, TorchRunner)
    return runner


@torch.inference_mode()
def log_probabilities(runner: TorchRunner, text: Text) -> torch.Tensor:
    """[compared positions, vocab] log-probabilities of the next token."""
    count = len(text.tokens)
    ops = runner.device.ops
    positions = torch.arange(count, dtype=torch.int32)
    pages = torch.arange(1, -(-count // PAGE) + 1, dtype=torch.int32).unsqueeze(0)
    rows = Rows(
        torch.tensor([0, count], dtype=torch.int32), torch.tensor([count], dtype=torch.int32), pages, (count,), (count,)
    )
    last = positions[:-1][text.compared]
    step = Step(torch.tensor(text.tokens, dtype=torch.int32), positions, positions.long() + PAGE, last, rows)
    return runner.model.logits(runner.model(step, ops, runner.kv), ops).log_softmax(-1)


def compare(exact: TorchRunner, small: TorchRunner, corpus: Sequence[Text]) -> dict[str, float]:
    """Means over compared positions: KL divergence, share of equal likeliest tokens, perplexities."""
    divergence = 0.0
    agreed = 0.0
    exact_loss = 0.0
    small_loss = 0.0
    for text in corpus:
        expected = log_probabilities(exact, text)
        actual = log_probabilities(small, text)
        divergence += (expected.exp() * (expected - actual)).sum().item()
        agreed += (expected.argmax(-1) == actual.argmax(-1)).sum().item()
        after = torch.tensor(text.tokens[1:])[text.compared].unsqueeze(1)
        exact_loss -= expected.gather(1, after).sum().item()
        small_loss -= actual.gather(1, after).sum().item()
    tokens = sum(int(text.compared.sum()) for text in corpus)
    return {
        "tokens": tokens,
        "kl": divergence / tokens,
        "agreed": agreed / tokens,
        "peer_perplexity": math.exp(exact_loss / tokens),
        "perplexity": math.exp(small_loss / tokens),
    }


def correct_share(runner: TorchRunner, tokenizer: Tokenizer) -> float:
    """The share of guide's held-out questions that it answers correctly."""
    end = tokenizer.token_to_id(END)

    def answer(prompts: list[str]) -> list[str]:
        written: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}

        engine = Engine(runner)
        for index, prompt in enumerate(prompts):
            ids = tuple(tokenizer.encode(prompt, add_special_tokens=False).ids)
            engine.submit(Request(str(index), ids, MAX_ANSWER, stop_ids=frozenset({end})))
        left = len(prompts)
        while left:
            for delta in engine.step():
                written[delta.request_id] += delta.tokens
                left -= delta.finish is not None
        return tokenizer.decode_batch(list(written.values()), skip_special_tokens=True)

    return float(evaluate.report(evaluate.run_dialogues(evaluate.load(HELDOUT), answer))["share"])


def dialogues(tokenizer: Tokenizer) -> list[Text]:
    """Conversations of UNUSED_SEED. The tokens of the assistant are compared."""
    opening = tokenizer.encode(ASSISTANT).ids
    end = tokenizer.token_to_id(END)
    conversations = []
    for text in texts(UNUSED_SEED, 0, CONVERSATIONS, Facts.load(FACTS)):
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        by_assistant = torch.from_numpy(answers(np.array([tokens]), opening, end)[0])
        conversations.append(Text(tokens, by_assistant[1:]))
    return conversations


def guide_rows() -> list[Row]:
    folder = paths.guide_dir()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    corpus = dialogues(tokenizer)
    exact = opened(folder, "none")
    right = correct_share(exact, tokenizer)
    results = []
    for quant in QUANTS:
        small = opened(folder, quant)
        answers_correct = {
            "right": correct_share(small, tokenizer),
            "peer_right": right,
            "bytes": small.spec.weight_bytes,
        }
        results.append(_row(f"guide, its answers, {quant}", compare(exact, small, corpus), **answers_correct))
        full = [Text(text.tokens, torch.ones_like(text.compared)) for text in corpus]
        results.append(_row(f"guide, whole conversations, {quant}", compare(exact, small, full)))
        small.close()
    return results


def random_rows(folder: Path) -> list[Row]:
    exact = opened(folder, "none")
    random = torch.Generator().manual_seed(1)
    token_ids = torch.randint(exact.spec.vocab_size, (RANDOM_TEXTS, LENGTH), generator=random).tolist()
    corpus = [Text(tokens, torch.ones(LENGTH - 1, dtype=torch.bool)) for tokens in token_ids]
    results = []
    for quant in QUANTS:
        small = opened(folder, quant)
        numbers = compare(exact, small, corpus)
        del numbers["perplexity"], numbers["peer_perplexity"]
        results.append(_row(f"{folder.name}, random weights, {quant}", numbers, bytes=small.spec.weight_bytes))
        small.close()
    return results


def _row(name: str, numbers: dict[str, float], **more: float) -> Row:
    rounded = {key: round(value, 5) for key, value in (numbers | more).items()}
    divergence = rounded.pop("kl")
    return row(name, 0.0, "nats per token", **rounded) | {"ours": divergence}


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("folders", type=Path, nargs="*", help="model folders")
    results = list(chain.from_iterable(map(random_rows, arguments.parse_args().folders)))
    save("quality", results + guide_rows())
