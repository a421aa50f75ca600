"""The model and its training: next-token loss on answers, AdamW, cosine schedule, bfloat16 products, float32 weights."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from .chatml import CONTEXT
from .dataset import Bucket, batches


@dataclass(frozen=True)
class Plan:
    """The parameters of a run. They fix the number of steps and not the time, so that a seed gives the same run."""

    seed: int = 20261128
    shards: int = 48
    per_shard: int = 20_000  # conversations per shard
    steps: int = 4400
    tokens_per_batch: int = 65_536
    peak: float = 1.5e-3  # maximum learning rate
    warm_up: int = 300  # steps
    weight_decay: float = 0.1
    dropout: float = 0.05
    log_every: int = 250  # steps
    hidden: int = 384
    layers: int = 8
    vocab: int = 6144


SMOKE = Plan(
    shards=1, per_shard=400, steps=30, tokens_per_batch=2048, peak=3e-3, warm_up=5, log_every=10, hidden=64, layers=2, vocab=1024
)  # fmt: skip


def shape(plan: Plan, vocab: int) -> Qwen3Config:
    """About 15 M parameters with the default plan. The embedding and the output head share their weights."""
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=plan.hidden,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.hidden // 64,
        num_key_value_heads=max(1, plan.hidden // 192),
        head_dim=64,
        intermediate_size=plan.hidden * 8 // 3,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rope_theta=10000.0,
    )


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


def fit(model: Qwen3ForCausalLM, buckets: list[Bucket], plan: Plan, device: str) -> list[dict[str, float]]:
    """Train the parameters of a model that require gradients. Seed torch before the model is created.

    Returns the loss curve: step, mean loss since the last entry, learning rate, seconds.
    """
    model.to(device).train()
    add_dropout(model, plan.dropout)
    optimizer = _optimizer(model, plan, device)
    if device != "cpu":  # all layers share one compilation; compiling the model would add a causal mask
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    on_device = [Bucket(bucket.tokens.to(device), bucket.answer_mask.to(device)) for bucket in buckets]
    curve: list[dict[str, float]] = []
    total = torch.zeros((), device=device)
    start = time.monotonic()
    for step, (number, rows) in enumerate(islice(_endless(buckets, plan), plan.steps)):
        rows = rows.to(device)
        loss = _loss(model, on_device[number].tokens[rows].long(), on_device[number].answer_mask[rows], device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, plan)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.detach()
        if (step + 1) % plan.log_every == 0:
            seconds = round(time.monotonic() - start, 1)
            mean = round(total.item() / plan.log_every, 5)
            curve.append({"step": step + 1, "loss": mean, "rate": rate(step, plan), "seconds": seconds})
            print(curve[-1], flush=True)
            total.zero_()
    model.eval()
    return curve


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
