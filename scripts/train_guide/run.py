"""Makes the bundled model from nothing: facts, corpus, tokenizer, training, export, scores.

    python -m scripts.train_guide.run [--out FOLDER] [--facts FILE] [--checkpoint FILE] [--smoke]

The same seed on the same software makes the same model. Facts come from the localllm installed here, or from a file
that `--save-facts FILE` wrote where it is installed. `--smoke` makes a toy in seconds on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from . import evaluate, facts
from .corpus import DEVELOPMENT, HELDOUT
from .dataset import build, texts
from .export import export
from .shape import VOCAB, guide_config, smoke_config
from .tokenizer import train_tokenizer
from .train import SMOKE, Plan, train


def make(
    plan: Plan, known: facts.Facts, out: Path, device: str, checkpoint: Path | None, *, smoke: bool, workers: int
) -> None:
    """Train by the plan and write the model, and `training.json` with the plan and the loss curve, to out."""
    sample = min(plan.per_shard, 30_000)
    tokenizer = train_tokenizer(texts(plan.seed, plan.shards, sample, known), 1024 if smoke else VOCAB)
    buckets = build(tokenizer, plan.seed, plan.shards, plan.per_shard, known, workers)
    tokens = sum(int((bucket.tokens != 0).sum()) for bucket in buckets)
    print(f"{sum(len(b.tokens) for b in buckets)} conversations, {tokens} tokens", flush=True)
    config = smoke_config(tokenizer.get_vocab_size()) if smoke else guide_config(tokenizer.get_vocab_size())
    model, curve = train(config, buckets, plan, device, checkpoint)
    export(model, tokenizer, out)
    table = {"plan": asdict(plan), "torch": torch.__version__, "device": device, "tokens": tokens, "curve": curve}
    (out / "training.json").write_text(json.dumps(table, indent=1) + "\n", "utf-8")


def scores(out: Path, device: str) -> None:
    """Print both sets' scores, and every wrong answer of the development set."""
    for file in (DEVELOPMENT, HELDOUT):
        results = evaluate.score(out, evaluate.load(file), device)
        print(file.stem, json.dumps(evaluate.report(results)), flush=True)
        for result in results:
            if not result.right and file == DEVELOPMENT:
                print(f"  {result.question.topic}: {result.question.turns} -> {result.answer!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the bundled model guide.")
    parser.add_argument("--out", type=Path, default=evaluate.GUIDE)
    parser.add_argument("--facts", type=Path, help="read the program's facts from this file")
    parser.add_argument("--save-facts", type=Path, help="write the program's facts to this file and end")
    parser.add_argument("--checkpoint", type=Path, help="write progress to this file, and go on from it")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--smoke", action="store_true", help="a toy model in seconds")
    arguments = parser.parse_args()
    if arguments.save_facts:
        facts.collect().save(arguments.save_facts)
        return 0
    known = facts.Facts.load(arguments.facts) if arguments.facts else facts.collect()
    plan = SMOKE if arguments.smoke else Plan()
    if arguments.steps:
        plan = replace(plan, steps=arguments.steps)
    device = "cuda" if torch.cuda.is_available() and not arguments.smoke else "cpu"
    workers = 1 if arguments.smoke else os.cpu_count() or 1
    make(plan, known, arguments.out, device, arguments.checkpoint, smoke=arguments.smoke, workers=workers)
    if not arguments.smoke:
        scores(arguments.out, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
