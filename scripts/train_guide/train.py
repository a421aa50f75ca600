"""The training loop: next-token loss on the answers, AdamW, cosine schedule, bfloat16 products over float32 weights."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from .dataset import Bucket, batches


@dataclass(frozen=True)
class Plan:
    """One run. The number of steps is fixed, not the time, so that a seed gives the same run."""

    seed: int = 20261121
    shards: int = 64
    per_shard: int = 20_000  # conversations
    steps: int = 4800
    tokens_per_batch: int = 65_536
    peak: float = 1.5e-3  # learning rate
    warm_up: int = 300
    weight_decay: float = 0.1
    dropout: float = 0.05
    log_every: int = 250


SMOKE = Plan(shards=1, per_shard=400, steps=30, tokens_per_batch=2048, peak=3e-3, warm_up=5, log_every=10)


def rate(step: int, plan: Plan) -> float:
    """Learning rate: linear rise, then a cosine down to a hundredth."""
    if step < plan.warm_up:
        return plan.peak * (step + 1) / plan.warm_up
    done = (step - plan.warm_up) / max(1, plan.steps - plan.warm_up)
    return plan.peak * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)


def _endless(buckets: list[Bucket], plan: Plan) -> Iterator[tuple[int, torch.Tensor]]:
    generator = torch.Generator().manual_seed(plan.seed)
    while True:
        yield from batches(buckets, plan.tokens_per_batch, generator)


def add_dropout(model: Qwen3ForCausalLM, share: float) -> None:
    """Dropout on the embedding and on what each block adds, which Qwen3 has no setting for; off in eval mode."""

    def drop(module: torch.nn.Module, _: object, output: torch.Tensor) -> torch.Tensor:
        return functional.dropout(output, share, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


def train(
    config: Qwen3Config, buckets: list[Bucket], plan: Plan, device: str
) -> tuple[Qwen3ForCausalLM, list[dict[str, float]]]:
    """The trained model, and the loss curve: step, mean loss since the last entry, learning rate, seconds."""
    torch.manual_seed(plan.seed)
    model = Qwen3ForCausalLM(config).to(device).train()
    add_dropout(model, plan.dropout)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=device != "cpu",
    )
    on_device = [Bucket(bucket.tokens.to(device), bucket.learned.to(device)) for bucket in buckets]
    start, curve, total, source = time.monotonic(), [], torch.zeros((), device=device), _endless(buckets, plan)
    for step in range(plan.steps):
        number, rows = next(source)
        rows = rows.to(device)
        tokens, learned = on_device[number].tokens[rows].long(), on_device[number].learned[rows]
        with torch.autocast(device, torch.bfloat16):
            hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
            chosen = learned[:, 1:]
            logits = functional.linear(hidden[chosen], model.lm_head.weight)
        loss = functional.cross_entropy(logits.float(), tokens[:, 1:][chosen])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, plan)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.detach()
        if (step + 1) % plan.log_every == 0:
            entry = {"step": step + 1, "loss": round(total.item() / plan.log_every, 5), "rate": rate(step, plan)}
            curve.append({**entry, "seconds": round(time.monotonic() - start, 1)})
            print(curve[-1], flush=True)
            total.zero_()
    return model.eval(), curve
