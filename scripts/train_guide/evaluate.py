"""Scores a model on held-out questions. Each has a key: a pattern that its last answer must contain.

    python -m scripts.train_guide.evaluate [MODEL FOLDER] [--questions FILE] [--every N] [--failures] [--facts FILE]

The exit status is 1 if fewer than 95 % of the answers are right, or if an answer about the program is false: it names a
command, a flag, a key, a route or a variable that does not exist, or says that it does not know one that exists.
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
from zlib import crc32

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from .chatml import DOCUMENT_END, END, Message, render
from .corpus import HELDOUT
from .facts import Facts, collect

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "assets" / "guide"
MIN_SHARE = 0.95
REFUSAL = re.compile(r"beyond me|I do not know")
REFUSED_NAME = re.compile(r"I do not know[^`.]*`([^`]+)`")
SYSTEM = "You are a helpful, friendly assistant living on my laptop."  # of the area `system`


def _schema(name: str, **types: str) -> Message:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = {
    "weather": _schema("get_weather", city="string"),
    "add": _schema("add", a="integer", b="integer"),
    "user": _schema("lookup_user", user_id="integer"),
    "file": _schema("read_file", path="string"),
    "translate": _schema("translate", text="string", language="string"),
}

Answer = Callable[[list[str]], list[str]]  # converts prompts to answers


@dataclass
class Question:
    """A dialogue. `turns`: messages of the user, or results of a tool, which start with a brace. The model answers each.

    The last answer is right if it contains the pattern `key`, and is a refusal only if the key is one. `localllm NAME` in
    a key means that the answer explains this command; another answer may name it too.
    """

    area: str
    turns: list[str]
    key: str
    tools: list[Message] = field(default_factory=list)

    def right(self, answer: str) -> bool:
        refused = REFUSAL.search(answer) and not re.search("do not know|beyond me", self.key)
        key = re.sub(r"localllm (\(?[a-z]+[a-z |]*\)?)(?=$| &&|\|)", r"`localllm \1[^`]*`:", self.key)
        found = all(re.search(part, answer, re.IGNORECASE | re.DOTALL) for part in key.split(" && "))
        return found and not refused


@dataclass
class Result:
    question: Question
    answer: str
    right: bool


def load(file: Path, every: int = 1) -> list[Question]:
    """The questions of a file. A line is `TURN // TURN => KEY`; `# AREA TOOLS` begins an area."""
    questions = []
    area, tools = "", ""
    for line in file.read_text("utf-8").splitlines():
        if line.startswith("# "):
            area, _, tools = line[2:].partition(" ")
        elif line:
            turns, _, key = line.rpartition(" => ")
            schemas = [TOOLS[name] for name in tools.split(",") if name]
            questions.append(Question(area, turns.split(" // "), key, schemas))
    return questions[::every]


def falsehoods(answer: str, facts: Facts) -> list[str]:
    """Names in an answer that the program does not have, and names that exist although the answer does not know them."""
    refused = [name.removeprefix("localllm ") for name in REFUSED_NAME.findall(answer)]
    names = {name for kind, names in facts.known.items() if kind != "command flag" for name in names}
    if refused and re.match("I do not know", answer):
        return [name for name in refused if name in names and not name.startswith("-help")]
    return facts.invented(answer)


def run_dialogues(questions: list[Question], answer: Answer) -> list[Result]:
    """Run all dialogues; each contains the earlier answers of the model. Returns the last answers, checked."""
    dialogues: list[list[Message]] = [
        [{"role": "system", "content": SYSTEM}] if question.area == "system" else [] for question in questions
    ]
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


def _message(turn: str) -> Message:
    return {"role": "tool" if turn.startswith("{") else "user", "content": turn}


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


def report(results: list[Result], facts: Facts | None = None) -> dict[str, Any]:
    """The share of right answers, also of each area, and the false answers."""
    areas: dict[str, list[bool]] = defaultdict(list)
    for result in results:
        areas[result.question.area].append(result.right)
    right = sum(result.right for result in results)
    table: dict[str, Any] = {"questions": len(results), "right": right, "share": round(right / len(results), 4)}
    table["areas"] = {area: f"{sum(marks)}/{len(marks)}" for area, marks in areas.items()}
    if facts:
        found = {result.question.turns[-1]: falsehoods(result.answer, facts) for result in results}
        table["false"] = {question: names for question, names in found.items() if names}
    return table


def checksums(facts: Facts) -> dict[str, int]:
    """Fact -> checksum of its answer."""
    return {name: crc32(fact.answer.encode()) for name, fact in facts.table.items()}


def changes(folder: Path, facts: Facts) -> list[str]:
    """The facts that differ from those of the training of a model."""
    trained: dict[str, int] = json.loads((folder / "training.json").read_text("utf-8"))["facts"]
    live = checksums(facts)
    return sorted(name for name in trained.keys() | live.keys() if trained.get(name) != live.get(name))


def failures(results: list[Result]) -> list[str]:
    return [
        f"{result.question.area}: {' // '.join(result.question.turns)} -> {result.answer!r}; key {result.question.key}"
        for result in results
        if not result.right
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Score guide on its held-out questions.")
    parser.add_argument("folder", type=Path, nargs="?", default=GUIDE)
    parser.add_argument("--questions", type=Path, default=HELDOUT)
    parser.add_argument("--every", type=int, default=1, help="take every n-th question only")
    parser.add_argument("--failures", action="store_true", help="print each wrong answer")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--facts", type=Path, help="read the facts about the program from this file")
    arguments = parser.parse_args()
    facts = Facts.load(arguments.facts) if arguments.facts else collect()
    results = score(arguments.folder, load(arguments.questions, arguments.every), arguments.device)
    if arguments.failures:
        print(*failures(results), sep="\n")
    table = report(results, facts)
    print(json.dumps(table, indent=2))
    for name in changes(arguments.folder, facts):
        print(f"warning: changed since the training of guide: {name}")
    return 0 if table["share"] >= MIN_SHARE and not table["false"] else 1


if __name__ == "__main__":
    sys.exit(main())
