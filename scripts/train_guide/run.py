"""Trains the built-in model and its adapters from scratch: facts, corpus, tokenizer, training, export, examination.

    python -m scripts.train_guide.run [--out FOLDER] [--facts FILE] [--steps N] [--smoke]

The same seed with the same software and facts gives the same data. Facts come from the installed localllm, or from a
file that facts.py wrote on another machine. `--smoke` trains toy models in minutes on a CPU. The folder gets the files of
assets/guide and assets/adapters.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from . import adapters, evaluate, known_answers
from .corpus import DEVELOPMENT, HELDOUT
from .dataset import build, texts
from .export import export
from .facts import Facts, collect
from .tokenizer import train_tokenizer
from .train import SMOKE, Plan, fit, shape


def make(plan: Plan, facts: Facts, out: Path, device: str, workers: int) -> None:
    """Train by the plan. Writes the model, and `training.json` with the plan and the loss curve, to the folder `out`."""
    start = time.monotonic()
    tokenizer = train_tokenizer(texts(plan.seed, plan.shards, min(plan.per_shard, 20_000), facts), plan.vocab)
    buckets = build(tokenizer, plan.seed, plan.shards, plan.per_shard, facts, workers)
    tokens = sum(int((bucket.tokens != 0).sum()) for bucket in buckets)
    seconds = time.monotonic() - start
    print(f"{sum(len(b.tokens) for b in buckets)} conversations, {tokens} tokens in {seconds:.0f} s", flush=True)
    torch.manual_seed(plan.seed)
    model = Qwen3ForCausalLM(shape(plan, tokenizer.get_vocab_size()))
    curve = fit(model, buckets, plan, device)
    export(model, tokenizer, out)
    table = {"plan": asdict(plan), "torch": torch.__version__, "device": device, "tokens": tokens, "curve": curve}
    table["facts"] = evaluate.checksums(facts)
    (out / "training.json").write_text(json.dumps(table, indent=1) + "\n", "utf-8")


def examine(model: Path, facts: Facts, device: str, every: int) -> None:
    """Add the scores of both sets of questions to `training.json`, and print all wrong answers.

    `every`: take every n-th question only.
    """
    table = json.loads((model / "training.json").read_text("utf-8"))
    for file in (DEVELOPMENT, HELDOUT):
        results = evaluate.score(model, evaluate.load(file, every), device)
        table[file.stem] = evaluate.report(results, facts)
        print(file.stem, json.dumps(table[file.stem]), *evaluate.failures(results), sep="\n", flush=True)
    (model / "training.json").write_text(json.dumps(table, indent=1) + "\n", "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the built-in model guide and its adapters.")
    parser.add_argument("--out", type=Path, default=evaluate.ROOT / "assets")
    parser.add_argument("--facts", type=Path, help="read the facts about the program from this file")
    parser.add_argument("--steps", type=int, help="steps of guide; the adapters have a tenth of them")
    parser.add_argument("--smoke", action="store_true", help="train toy models")
    arguments = parser.parse_args()
    facts = Facts.load(arguments.facts) if arguments.facts else collect()
    plan, small = (SMOKE, adapters.SMOKE) if arguments.smoke else (Plan(), adapters.PLAN)
    if arguments.steps:
        plan, small = replace(plan, steps=arguments.steps), replace(small, steps=max(1, arguments.steps // 10))
    device = "cuda" if torch.cuda.is_available() and not arguments.smoke else "cpu"
    workers = 1 if arguments.smoke else os.cpu_count() or 1
    every = 40 if arguments.smoke else 1  # questions: a toy model never ends its answers
    guide = arguments.out / "guide"
    make(plan, facts, guide, device, workers)
    examine(guide, facts, device, every)
    known_answers.write(guide, every)
    for name in adapters.RANKS:
        adapters.make(name, small, guide, arguments.out / "adapters", facts, device, workers, every)
    return 0


if __name__ == "__main__":
    sys.exit(main())
