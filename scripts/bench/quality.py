"""What smaller weights cost: mean KL divergence and perplexity against the same model in bf16, and guide's examination.

`python scripts/bench/quality.py [MODEL FOLDER …]`: the built-in model on conversations it was not trained on and on its
held-out questions, every folder on random tokens (divergence alone: a model with random weights predicts nothing).
Activations are float32; the peer is bf16.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rows import Row, row, save
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from localllm.app import paths
from localllm.backends import cpu
from localllm.backends.pytorch.inputs import Step
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.engine import Engine
from localllm.engine.modelfiles import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.quantization import Quant
from localllm.engine.request import Request
from localllm.kernels.ops.attention import Rows
from scripts.train_guide import evaluate
from scripts.train_guide.chatml import ASSISTANT, END
from scripts.train_guide.corpus import HELDOUT
from scripts.train_guide.dataset import answers, texts
from scripts.train_guide.facts import Facts

QUANTS: tuple[Quant, ...] = ("int8", "int4", "fp8")
FACTS = Path(evaluate.__file__).with_name("facts.json")
UNSEEN = 987_654  # a seed that no training has used
CONVERSATIONS, RANDOM_TEXTS, LENGTH = 150, 4, 128
CONTEXT, PAGE = 2048, 16
LONGEST_ANSWER = 200


class Text(NamedTuple):
    """Tokens, and at which of them a model is judged by what it expects next."""

    tokens: list[int]
    judged: torch.Tensor  # [tokens - 1] bool


def opened(folder: Path, quant: Quant) -> TorchRunner:
    budget = LoadOptions(context=CONTEXT, max_rows=32, page_size=PAGE, dtype="float32", quant=quant)
    runner = cpu.open(read_model(folder), budget)
    assert isinstance(runner, TorchRunner)
    return runner


@torch.inference_mode()
def log_probabilities(runner: TorchRunner, text: Text) -> torch.Tensor:
    """Of every next token, at the judged places of a text [places, vocab]."""
    count, ops = len(text.tokens), runner.device.ops
    places = torch.arange(count, dtype=torch.int32)
    pages = torch.arange(1, -(-count // PAGE) + 1, dtype=torch.int32).unsqueeze(0)
    rows = Rows(
        torch.tensor([0, count], dtype=torch.int32), torch.tensor([count], dtype=torch.int32), pages, (count,), (count,)
    )
    last = places[:-1][text.judged]
    step = Step(torch.tensor(text.tokens, dtype=torch.int32), places, places.long() + PAGE, last, rows)
    return runner.model.logits(runner.model(step, ops, runner.kv), ops).log_softmax(-1)


def compare(exact: TorchRunner, small: TorchRunner, corpus: Sequence[Text]) -> dict[str, float]:
    """Means over judged tokens: divergence of `small` from `exact`, share of equal likeliest ones, perplexities."""
    divergence = agreed = exact_loss = small_loss = 0.0
    for text in corpus:
        meant, found = log_probabilities(exact, text), log_probabilities(small, text)
        divergence += (meant.exp() * (meant - found)).sum().item()
        agreed += (meant.argmax(-1) == found.argmax(-1)).sum().item()
        after = torch.tensor(text.tokens[1:])[text.judged].unsqueeze(1)
        exact_loss -= meant.gather(1, after).sum().item()
        small_loss -= found.gather(1, after).sum().item()
    tokens = sum(int(text.judged.sum()) for text in corpus)
    return {
        "tokens": tokens,
        "kl": divergence / tokens,
        "agreed": agreed / tokens,
        "peer_perplexity": math.exp(exact_loss / tokens),
        "perplexity": math.exp(small_loss / tokens),
    }


def examined(runner: TorchRunner, tokenizer: Tokenizer) -> float:
    """Share of guide's held-out questions answered rightly."""
    end = tokenizer.token_to_id(END)

    def answer(prompts: list[str]) -> list[str]:
        written: dict[str, list[int]] = {str(at): [] for at in range(len(prompts))}

        engine = Engine(runner)
        for at, prompt in enumerate(prompts):
            ids = tuple(tokenizer.encode(prompt, add_special_tokens=False).ids)
            engine.submit(Request(str(at), ids, LONGEST_ANSWER, stop_ids=frozenset({end})))
        left = len(prompts)
        while left:
            for delta in engine.step():
                written[delta.request_id] += delta.tokens
                left -= delta.finish is not None
        return tokenizer.decode_batch(list(written.values()), skip_special_tokens=True)

    return float(evaluate.report(evaluate.run_dialogues(evaluate.load(HELDOUT), answer))["share"])


def dialogues(tokenizer: Tokenizer) -> list[Text]:
    """Conversations of a seed of their own; judged is what the assistant says."""
    opening, end = tokenizer.encode(ASSISTANT).ids, tokenizer.token_to_id(END)
    made = []
    for text in texts(UNSEEN, 0, CONVERSATIONS, Facts.load(FACTS)):
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        said = torch.from_numpy(answers(np.array([tokens]), opening, end)[0])
        made.append(Text(tokens, said[1:]))
    return made


def guide_rows() -> list[Row]:
    folder = paths.guide_dir()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    corpus = dialogues(tokenizer)
    exact = opened(folder, "none")
    right = examined(exact, tokenizer)
    made = []
    for quant in QUANTS:
        small = opened(folder, quant)
        marks = {"right": examined(small, tokenizer), "peer_right": right, "bytes": small.spec.weight_bytes}
        made.append(_row(f"guide, its answers, {quant}", compare(exact, small, corpus), **marks))
        whole = [Text(text.tokens, torch.ones_like(text.judged)) for text in corpus]
        made.append(_row(f"guide, whole conversations, {quant}", compare(exact, small, whole)))
        small.close()
    return made


def random_rows(folder: Path) -> list[Row]:
    exact = opened(folder, "none")
    random = torch.Generator().manual_seed(1)
    drawn = torch.randint(exact.spec.vocab_size, (RANDOM_TEXTS, LENGTH), generator=random).tolist()
    corpus = [Text(tokens, torch.ones(LENGTH - 1, dtype=torch.bool)) for tokens in drawn]
    made = []
    for quant in QUANTS:
        small = opened(folder, quant)
        found = compare(exact, small, corpus)
        del found["perplexity"], found["peer_perplexity"]
        made.append(_row(f"{folder.name}, random weights, {quant}", found, bytes=small.spec.weight_bytes))
        small.close()
    return made


def _row(name: str, found: dict[str, float], **more: float) -> Row:
    numbers = {key: round(value, 5) for key, value in (found | more).items() if key != "kl"}
    return row(name, 0.0, "nats per token", **numbers) | {"ours": round(found["kl"], 5)}


if __name__ == "__main__":
    save("quality", [made for folder in map(Path, sys.argv[1:]) for made in random_rows(folder)] + guide_rows())
