"""Writes the known answers for `localllm selftest`: answers of which every token is by far the most probable.

    python -m scripts.train_guide.known_answers

A correct backend gives these answers in any precision; a wrong one most likely does not. The program changes more often
than the weights, so answers about hardware and lists of flags are left out: `localllm selftest` must not show outdated
answers.
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
COUNT = 24  # answers
MARGIN = 3.0  # minimum distance between the two most probable tokens at each position, in nats
MIN_TOKENS = 8  # tokens of an answer
MAX_TOKENS = 64
CHANGES = re.compile(
    r"\b(gpus?|cpu|backends?|cuda|hip|npu|xpu|mlx|llamacpp|gguf|windows|macs?|docker|this version)\b|^Usage:",
    re.IGNORECASE,
)


def main() -> None:
    tokenizer = Tokenizer.from_file(str(GUIDE / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(GUIDE, dtype=torch.float32)
    end = tokenizer.token_to_id(END)
    questions = [json.loads(line) for line in HELDOUT.read_text().splitlines()]
    prompts = [entry["turns"][0] for entry in questions if len(entry["turns"]) == 1 and not entry.get("tools")]
    random.Random(0).shuffle(prompts)
    known: list[dict[str, str]] = []
    for text in prompts:
        prompt = tokenizer.encode(render([{"role": "user", "content": text}], generate=True)).ids
        with torch.inference_mode():
            ids = model.generate(
                torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=end, pad_token_id=end
            )[0].tolist()
            logits = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        answer = ids[len(prompt) :]
        certain = answer[-1] == end and len(answer) >= MIN_TOKENS and (best[:, 0] - best[:, 1]).min() >= MARGIN
        answer_text = tokenizer.decode(answer[:-1])
        if certain and not CHANGES.search(answer_text):
            known.append({"prompt": text, "answer": answer_text})
        if len(known) == COUNT:
            break
    FILE.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(known)} answers in {FILE}")


if __name__ == "__main__":
    main()
