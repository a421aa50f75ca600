"""Scores a model on held-out questions. Each has a key: patterns that its last answer must contain.

    python -m scripts.train_guide.evaluate [MODEL FOLDER] [--questions FILE] [--every N] [--failures]

The exit status is 1 if fewer than 95 % of the answers are right.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from .chatml import DOCUMENT_END, END, render
from .corpus import HELDOUT

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "assets" / "guide"
MIN_SHARE = 0.95

Message = dict[str, Any]
Answer = Callable[[list[str]], list[str]]  # converts prompts to answers


@dataclass
class Question:
    """A dialogue. `turns`: messages of the user, or results of a tool, `{"tool": ...}`. The model answers each turn.

    The last answer is right if it contains all patterns of `key` and no pattern of `never`.
    """

    topic: str
    turns: list[Any]
    key: list[str]
    never: list[str] = field(default_factory=list)
    system: str = ""
    tools: list[Message] | None = None

    def right(self, answer: str) -> bool:
        has_key = all(re.search(pattern, answer, re.IGNORECASE | re.DOTALL) for pattern in self.key)
        return has_key and not any(re.search(pattern, answer, re.IGNORECASE) for pattern in self.never)


@dataclass
class Result:
    question: Question
    answer: str
    right: bool


def load(file: Path, every: int = 1) -> list[Question]:
    lines = file.read_text("utf-8").splitlines()
    return [Question(**json.loads(line)) for line in lines[::every]]


def run_dialogues(questions: list[Question], answer: Answer) -> list[Result]:
    """Run all dialogues; each contains the earlier answers of the model. Returns the last answers, checked."""
    dialogues: list[list[Message]] = [[{"role": "system", "content": q.system}] if q.system else [] for q in questions]
    last = [""] * len(questions)
    for turn in range(max(len(q.turns) for q in questions)):
        running = [index for index, q in enumerate(questions) if turn < len(q.turns)]
        for index in running:
            dialogues[index].append(_message(questions[index].turns[turn]))
        prompts = [render(dialogues[index], questions[index].tools, generate=True) for index in running]
        for index, text in zip(running, answer(prompts), strict=True):
            last[index] = text
            dialogues[index].append({"role": "assistant", "content": text})
    return [Result(q, text, q.right(text)) for q, text in zip(questions, last, strict=True)]


def _message(turn: str | dict[str, str]) -> Message:
    if isinstance(turn, str):
        return {"role": "user", "content": turn}
    return {"role": "tool", "content": turn["tool"]}


def greedy(model: PreTrainedModel, tokenizer: Tokenizer, limit: int = 200, rows: int = 128) -> Answer:
    """Greedy decoding in batches of `rows` prompts; an answer has at most `limit` tokens."""
    end = tokenizer.token_to_id(END)
    padding = tokenizer.token_to_id(DOCUMENT_END)

    @torch.inference_mode()
    def answer_batch(prompts: list[str]) -> list[str]:
        ids = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
        width = max(map(len, ids))
        tokens = torch.tensor([[padding] * (width - len(row)) + row for row in ids], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=model.device)
        cache = DynamicCache(config=model.config)
        columns = []  # [rows, 1] token ids, one entry per step
        running = torch.ones(len(ids), dtype=torch.bool, device=model.device)
        for _ in range(limit):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            output = model(input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache)
            tokens = output.logits[:, -1:].argmax(-1).where(running[:, None], padding)
            columns.append(tokens)
            running &= tokens[:, 0] != end
            if not running.any():
                break
            mask = torch.cat([mask, torch.ones_like(tokens)], 1)
        return tokenizer.decode_batch(torch.cat(columns, 1).tolist(), skip_special_tokens=True)

    def answer(prompts: list[str]) -> list[str]:
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        answers = [""] * len(prompts)
        for start in range(0, len(order), rows):
            group = order[start : start + rows]
            for index, text in zip(group, answer_batch([prompts[index] for index in group]), strict=True):
                answers[index] = text
        return answers

    return answer


def score(
    folder: Path, questions: list[Question], device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[Result]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    return run_dialogues(questions, greedy(model, Tokenizer.from_file(str(folder / "tokenizer.json"))))


def report(results: list[Result]) -> dict[str, Any]:
    topics: dict[str, list[bool]] = defaultdict(list)
    for result in results:
        topics[result.question.topic].append(result.right)
    right = sum(result.right for result in results)
    return {
        "questions": len(results),
        "right": right,
        "share": round(right / len(results), 4),
        "topics": {topic: f"{sum(marks)}/{len(marks)}" for topic, marks in sorted(topics.items())},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Score guide on its held-out questions.")
    parser.add_argument("folder", type=Path, nargs="?", default=GUIDE)
    parser.add_argument("--questions", type=Path, default=HELDOUT)
    parser.add_argument("--every", type=int, default=1, help="take every n-th question only")
    parser.add_argument("--failures", action="store_true", help="print each wrong answer")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    results = score(arguments.folder, load(arguments.questions, arguments.every), arguments.device)
    if arguments.failures:
        for result in results:
            if not result.right:
                print(
                    f"{result.question.topic}: {result.question.turns} -> {result.answer!r}; key {result.question.key}"
                )
    table = report(results)
    print(json.dumps(table, indent=2))
    return 0 if table["share"] >= MIN_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
