"""Scores a model on held-out questions: each has an exact key, a pattern its last answer must contain.

    python -m scripts.train_guide.evaluate [MODEL FOLDER] [--questions FILE] [--every N] [--failures]

Exits 1 when fewer than 95 % are right.
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
ENOUGH = 0.95

Message = dict[str, Any]
Answer = Callable[[list[str]], list[str]]  # prompts to answers


@dataclass
class Question:
    """`turns` are what the person writes; the model answers each, and the last answer is judged.

    A turn may also be a tool's result, `{"tool": ...}`. All patterns of `key` must be found, none of `never`.
    """

    topic: str
    turns: list[Any]
    key: list[str]
    never: list[str] = field(default_factory=list)
    system: str = ""
    tools: list[Message] | None = None

    def right(self, answer: str) -> bool:
        found = [re.search(pattern, answer, re.IGNORECASE | re.DOTALL) is not None for pattern in self.key]
        return all(found) and not any(re.search(pattern, answer, re.IGNORECASE) for pattern in self.never)


@dataclass
class Result:
    question: Question
    answer: str
    right: bool


def load(file: Path, every: int = 1) -> list[Question]:
    lines = file.read_text("utf-8").splitlines()
    return [Question(**json.loads(line)) for line in lines[::every]]


def judge(questions: list[Question], answer: Answer) -> list[Result]:
    """Plays every conversation with the model's own earlier answers."""
    dialogues: list[list[Message]] = [[{"role": "system", "content": q.system}] if q.system else [] for q in questions]
    last = [""] * len(questions)
    for turn in range(max(len(q.turns) for q in questions)):
        playing = [at for at, q in enumerate(questions) if turn < len(q.turns)]
        for at in playing:
            said = questions[at].turns[turn]
            role, content = ("user", said) if isinstance(said, str) else ("tool", said["tool"])
            dialogues[at].append({"role": role, "content": content})
        prompts = [render(dialogues[at], questions[at].tools, generate=True) for at in playing]
        for at, text in zip(playing, answer(prompts), strict=True):
            last[at] = text
            dialogues[at].append({"role": "assistant", "content": text})
    return [Result(q, text, q.right(text)) for q, text in zip(questions, last, strict=True)]


def greedy(model: PreTrainedModel, tokenizer: Tokenizer, limit: int = 200, rows: int = 128) -> Answer:
    """The likeliest token each time, many prompts at once."""
    end, padding = tokenizer.token_to_id(END), tokenizer.token_to_id(DOCUMENT_END)

    @torch.inference_mode()
    def some(prompts: list[str]) -> list[str]:
        ids = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
        width = max(map(len, ids))
        tokens = torch.tensor([[padding] * (width - len(row)) + row for row in ids], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=model.device)
        cache, written = DynamicCache(config=model.config), []
        running = torch.ones(len(ids), dtype=torch.bool, device=model.device)
        for _ in range(limit):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            output = model(input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache)
            tokens = output.logits[:, -1:].argmax(-1).where(running[:, None], padding)
            written.append(tokens)
            running &= tokens[:, 0] != end
            if not running.any():
                break
            mask = torch.cat([mask, torch.ones_like(tokens)], 1)
        return tokenizer.decode_batch(torch.cat(written, 1).tolist(), skip_special_tokens=True)

    def answer(prompts: list[str]) -> list[str]:
        order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
        answers = [""] * len(prompts)
        for start in range(0, len(order), rows):
            group = order[start : start + rows]
            for at, text in zip(group, some([prompts[at] for at in group]), strict=True):
                answers[at] = text
        return answers

    return answer


def score(
    folder: Path, questions: list[Question], device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[Result]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    return judge(questions, greedy(model, Tokenizer.from_file(str(folder / "tokenizer.json"))))


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
    return 0 if table["share"] >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
