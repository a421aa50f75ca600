"""Trains the built-in model from scratch: facts, corpus, tokenizer, training, export, scores.

    python -m scripts.train_guide.run [--out FOLDER] [--facts FILE] [--checkpoint FILE] [--smoke]

The same seed with the same software gives the same data. Facts come from the installed localllm, or from a file that
`--save-facts FILE` wrote on another machine. `--smoke` trains a toy model in seconds on a CPU.
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
    plan: Plan, program: facts.Facts, out: Path, device: str, checkpoint: Path | None, *, smoke: bool, workers: int
) -> None:
    """Train by the plan. Writes the model, and `training.json` with the plan and the loss curve, to the folder `out`."""
    sample = min(plan.per_shard, 30_000)
    tokenizer = train_tokenizer(texts(plan.seed, plan.shards, sample, program), 1024 if smoke else VOCAB)
    buckets = build(tokenizer, plan.seed, plan.shards, plan.per_shard, program, workers)
    tokens = sum(int((bucket.tokens != 0).sum()) for bucket in buckets)
    print(f"{sum(len(b.tokens) for b in buckets)} conversations, {tokens} tokens", flush=True)
    config = smoke_config(tokenizer.get_vocab_size()) if smoke else guide_config(tokenizer.get_vocab_size())
    model, curve = train(config, buckets, plan, device, checkpoint)
    export(model, tokenizer, out)
    table = {"plan": asdict(plan), "torch": torch.__version__, "device": device, "tokens": tokens, "curve": curve}
    (out / "training.json").write_text(json.dumps(table, indent=1) + "\n", "utf-8")


def scores(out: Path, device: str) -> None:
    """Print the scores of both sets of questions, and every wrong answer of the development set."""
    for file in (DEVELOPMENT, HELDOUT):
        results = evaluate.score(out, evaluate.load(file), device)
        print(file.stem, json.dumps(evaluate.report(results)), flush=True)
        for result in results:
            if not result.right and file == DEVELOPMENT:
                print(f"  {result.question.topic}: {result.question.turns} -> {result.answer!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the built-in model guide.")
    parser.add_argument("--out", type=Path, default=evaluate.GUIDE)
    parser.add_argument("--facts", type=Path, help="read the facts about the program from this file")
    parser.add_argument("--save-facts", type=Path, help="write the facts about the program to this file and exit")
    parser.add_argument(
        "--checkpoint", type=Path, help="write checkpoints to this file, and continue from it if it exists"
    )
    parser.add_argument("--steps", type=int)
    parser.add_argument("--smoke", action="store_true", help="train a toy model in seconds")
    arguments = parser.parse_args()
    if arguments.save_facts:
        facts.collect().save(arguments.save_facts)
        return 0
    program = facts.Facts.load(arguments.facts) if arguments.facts else facts.collect()
    plan = SMOKE if arguments.smoke else Plan()
    if arguments.steps:
        plan = replace(plan, steps=arguments.steps)
    device = "cuda" if torch.cuda.is_available() and not arguments.smoke else "cpu"
    workers = 1 if arguments.smoke else os.cpu_count() or 1
    make(plan, program, arguments.out, device, arguments.checkpoint, smoke=arguments.smoke, workers=workers)
    if not arguments.smoke:
        scores(arguments.out, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
