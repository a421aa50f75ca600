"""The training loop: next-token loss on answers, AdamW, cosine schedule, bfloat16 products with float32 weights.

A run that was interrupted continues from its checkpoint with the same batches in the same order. A checkpoint of other
data or of another plan is refused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from .dataset import Bucket, batches


@dataclass(frozen=True)
class Plan:
    """The parameters of a run. They fix the number of steps and not the time, so that a seed gives the same run."""

    seed: int = 20261121
    shards: int = 72
    per_shard: int = 20_000  # conversations per shard
    steps: int = 4400
    tokens_per_batch: int = 65_536
    peak: float = 1.5e-3  # maximum learning rate
    warm_up: int = 300  # steps
    weight_decay: float = 0.1
    dropout: float = 0.05
    log_every: int = 250  # steps
    save_every: int = 500  # steps


SMOKE = Plan(shards=1, per_shard=400, steps=30, tokens_per_batch=2048, peak=3e-3, warm_up=5, log_every=10)


def rate(step: int, plan: Plan) -> float:
    """The learning rate of a step: a linear rise, then a cosine down to a hundredth of the peak."""
    if step < plan.warm_up:
        return plan.peak * (step + 1) / plan.warm_up
    done = (step - plan.warm_up) / max(1, plan.steps - plan.warm_up)
    return plan.peak * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)


def _endless(buckets: list[Bucket], plan: Plan) -> Iterator[tuple[int, torch.Tensor]]:
    generator = torch.Generator().manual_seed(plan.seed)
    while True:
        yield from batches(buckets, plan.tokens_per_batch, generator)


def add_dropout(model: Qwen3ForCausalLM, share: float) -> None:
    """Add dropout to the embedding and to the outputs of attention and MLP: Qwen3Config has no setting for it.

    `share`: the probability that an element is dropped. Dropout is off in eval mode.
    """

    def drop(module: torch.nn.Module, _: object, output: torch.Tensor) -> torch.Tensor:
        return functional.dropout(output, share, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


@dataclass
class Progress:
    """The part of a checkpoint that is neither weights nor optimizer."""

    step: int  # number of completed steps
    curve: list[dict[str, float]]
    total: torch.Tensor  # sum of the losses since the last entry of the curve; scalar, on the device
    seconds: float  # duration of the run


def train(
    config: Qwen3Config, buckets: list[Bucket], plan: Plan, device: str, checkpoint: Path | None = None
) -> tuple[Qwen3ForCausalLM, list[dict[str, float]]]:
    """Train a new model. Returns the model and the loss curve of `fit`."""
    torch.manual_seed(plan.seed)
    model = Qwen3ForCausalLM(config)
    return model, fit(model, buckets, plan, device, checkpoint)


def fit(
    model: Qwen3ForCausalLM, buckets: list[Bucket], plan: Plan, device: str, checkpoint: Path | None = None
) -> list[dict[str, float]]:
    """Train the parameters of a model that require gradients. Seed torch before the model is created.

    Returns the loss curve: step, mean loss since the last entry, learning rate, seconds. Continues from the file
    `checkpoint` if it exists, and writes it every `save_every` steps.
    """
    model.to(device).train()
    add_dropout(model, plan.dropout)
    optimizer = _optimizer(model, plan, device)
    progress = Progress(0, [], torch.zeros((), device=device), 0.0)
    run = _run_name(plan, buckets)
    if checkpoint is not None and checkpoint.exists():
        progress = _restore(checkpoint, run, model, optimizer, device)
    if device != "cpu":
        for (
            layer
        ) in model.model.layers:  # all layers share one compilation; compiling the model would add a causal mask
            layer.compile(dynamic=True)
    on_device = [Bucket(bucket.tokens.to(device), bucket.answer_mask.to(device)) for bucket in buckets]
    start = time.monotonic() - progress.seconds
    remaining = islice(_endless(buckets, plan), progress.step, plan.steps)
    for step, (number, rows) in enumerate(remaining, progress.step):
        rows = rows.to(device)
        loss = _loss(model, on_device[number].tokens[rows].long(), on_device[number].answer_mask[rows], device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, plan)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.total += loss.detach()
        if (step + 1) % plan.log_every == 0:
            entry = {"step": step + 1, "loss": round(progress.total.item() / plan.log_every, 5)}
            progress.curve.append({**entry, "rate": rate(step, plan), "seconds": round(time.monotonic() - start, 1)})
            print(progress.curve[-1], flush=True)
            progress.total.zero_()
        if checkpoint is not None and (step + 1) % plan.save_every == 0:
            progress.step = step + 1
            progress.seconds = time.monotonic() - start
            _save(checkpoint, run, model, optimizer, progress, device)
    model.eval()
    return progress.curve


def _optimizer(model: Qwen3ForCausalLM, plan: Plan, device: str) -> torch.optim.AdamW:
    """AdamW without weight decay for the weights of norms."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim > 1]
    vectors = [p for p in trained if p.ndim == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=device != "cpu",
    )


def _loss(model: Qwen3ForCausalLM, tokens: torch.Tensor, answer_mask: torch.Tensor, device: str) -> torch.Tensor:
    """The mean loss of the tokens in answers. Both tensors are [rows, width]."""
    with torch.autocast(device, torch.bfloat16):
        hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
        targets = answer_mask[:, 1:]
        logits = functional.linear(hidden[targets], model.lm_head.weight)
    return functional.cross_entropy(logits.float(), tokens[:, 1:][targets])


def _run_name(plan: Plan, buckets: list[Bucket]) -> str:
    """The plan without its log and save intervals, and a checksum of the data."""
    data = 0
    for bucket in buckets:
        data = crc32(bucket.answer_mask.numpy().tobytes(), crc32(bucket.tokens.numpy().tobytes(), data))
    return f"{replace(plan, log_every=0, save_every=0)} of {data:08x}"


def _save(
    file: Path, run: str, model: Qwen3ForCausalLM, optimizer: torch.optim.AdamW, progress: Progress, device: str
) -> None:
    """Write a new file and rename it, so that an interrupted run leaves the last complete checkpoint."""
    table: dict[str, Any] = {
        "run": run,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": vars(progress),
        "random": torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(),
    }
    new = file.with_name(file.name + ".new")
    torch.save(table, new)
    new.replace(file)


def _restore(file: Path, run: str, model: Qwen3ForCausalLM, optimizer: torch.optim.AdamW, device: str) -> Progress:
    table = torch.load(file, map_location=device)
    if table["run"] != run:
        raise SystemExit(f"{file} is of another run ({table['run']}, not {run}): remove it, or name another file")
    model.load_state_dict(table["model"])
    optimizer.load_state_dict(table["optimizer"])
    (torch.set_rng_state if device == "cpu" else torch.cuda.set_rng_state)(table["random"].cpu())
    return Progress(**table["progress"])
