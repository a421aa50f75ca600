"""Writes the known answers for `localllm selftest`: answers of which every token is by far the most probable.

A correct backend gives these answers in any precision; a wrong one most likely does not. The program changes more often
than the weights, so answers about hardware and lists of flags are left out: `localllm selftest` must not show outdated
answers.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from .chatml import END, render
from .corpus import HELDOUT
from .evaluate import load

COUNT = 24  # answers
MARGIN = 3.0  # minimum distance between the two most probable tokens at each position, in nats
MIN_TOKENS = 8  # tokens of an answer
MAX_TOKENS = 64
CHANGES = re.compile(
    r"\b(gpus?|cpu|backends?|cuda|hip|npu|xpu|mlx|llamacpp|gguf|windows|macs?|docker|this version)\b|^Flags of",
    re.IGNORECASE,
)


def write(folder: Path, every: int = 1) -> None:
    """Write `answers.json` to the folder of a model, from every n-th held-out question."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    end = tokenizer.token_to_id(END)
    prompts = [
        question.turns[0] for question in load(HELDOUT, every) if len(question.turns) == 1 and not question.tools
    ]
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
        if certain and not CHANGES.search(answer_text) and answer_text not in [one["answer"] for one in known]:
            known.append({"prompt": text, "answer": answer_text})
        if len(known) == COUNT:
            break
    (folder / "answers.json").write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(f"{len(known)} known answers", flush=True)
