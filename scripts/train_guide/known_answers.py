"""Writes what guide answers for certain: questions whose every token is the likeliest by far, for `localllm selftest`.

    python -m scripts.train_guide.known_answers

A backend that computes right gives these answers in any precision; one that does not is unlikely to. What the program
can do changes while the weights do not, so answers about hardware and lists of flags are left out: `localllm selftest`
shall show nobody what was true of an earlier version.
"""

from __future__ import annotations

import json
import random
import re

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from .chatml import END, render
from .corpus import HELDOUT
from .evaluate import GUIDE

FILE = GUIDE / "answers.json"
WANTED, MARGIN = 24, 3.0  # answers, and nats between the likeliest token and the next, everywhere
SHORTEST, LONGEST = 8, 64  # tokens of an answer
CHANGES = re.compile(
    r"\b(gpus?|cpu|backends?|cuda|hip|npu|xpu|mlx|llamacpp|gguf|windows|macs?|docker|this version)\b|^Usage:",
    re.IGNORECASE,
)


def main() -> None:
    tokenizer = Tokenizer.from_file(str(GUIDE / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(GUIDE, dtype=torch.float32)
    end = tokenizer.token_to_id(END)
    questions = [json.loads(line) for line in HELDOUT.read_text().splitlines()]
    asked = [one["turns"][0] for one in questions if len(one["turns"]) == 1 and not one.get("tools")]
    random.Random(0).shuffle(asked)
    found: list[dict[str, str]] = []
    for text in asked:
        prompt = tokenizer.encode(render([{"role": "user", "content": text}], generate=True)).ids
        with torch.inference_mode():
            told = model.generate(
                torch.tensor([prompt]), max_new_tokens=LONGEST, do_sample=False, eos_token_id=end, pad_token_id=end
            )[0].tolist()
            logits = model(torch.tensor([told])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        answer = told[len(prompt) :]
        certain = answer[-1] == end and len(answer) >= SHORTEST and (best[:, 0] - best[:, 1]).min() >= MARGIN
        said = tokenizer.decode(answer[:-1])
        if certain and not CHANGES.search(said):
            found.append({"prompt": text, "answer": said})
        if len(found) == WANTED:
            break
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(found)} answers in {FILE}")


if __name__ == "__main__":
    main()
