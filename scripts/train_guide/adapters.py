"""Trains the demonstration adapters of guide: LoRA factors for one style each, in the layout of PEFT.

The conversations are those of guide, with another seed and with answers in the style. Held-out questions are not among
them. run.py trains them after the weights of guide, because they fit only these weights.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from . import evaluate
from .corpus import HELDOUT
from .dataset import build
from .facts import Facts
from .styles import STYLES, Style, demands_prose, prompts
from .train import Plan, fit

RANKS = {"pirate": 16, "steps": 8}
ALPHA_PER_RANK = 2  # lora_alpha / rank, the factor of the products of A and B
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PLAN = Plan(
    seed=20261129, shards=16, per_shard=10_000, steps=400, peak=2e-3, warm_up=50, weight_decay=0.0, log_every=100
)
SMOKE = replace(PLAN, shards=1, per_shard=400, steps=20, tokens_per_batch=2048, warm_up=5, log_every=5)


class LoraLinear(nn.Module):
    """A frozen linear layer and its LoRA factors: y = W x + scale * B A x. At the start B is zero."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.scale = float(ALPHA_PER_RANK)
        self.a = nn.Parameter(torch.empty(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        return self.base(x) + self.scale * functional.linear(functional.linear(x, self.a), self.b)


def attach(model: Qwen3ForCausalLM, rank: int) -> None:
    """Freeze the model and add LoRA factors to the linear layers of TARGETS."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in TARGETS:
            setattr(model.get_submodule(parent), last, LoraLinear(module, rank))


def factors(model: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    """The factors of all layers by their names in PEFT's files."""
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            for letter, factor in (("A", module.a), ("B", module.b)):
                tensors[f"base_model.model.{name}.lora_{letter}.weight"] = factor.detach()
    return tensors


def save(model: Qwen3ForCausalLM, rank: int, folder: Path) -> None:
    """Write the factors in bfloat16 and the configuration to a folder, in the layout of PEFT."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in factors(model).items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "guide",
        "r": rank,
        "lora_alpha": ALPHA_PER_RANK * rank,
        "lora_dropout": 0.0,
        "target_modules": list(TARGETS),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


@dataclass(frozen=True)
class Scores:
    """The share of answers in the style, and of answers with the facts that their questions ask for."""

    style: float  # of the held-out prompts for prose
    right: float  # of all held-out questions; keys are compared with the answer in plain style
    right_prose: float  # of the held-out questions that ask for prose


def scores(base: Path, model: Qwen3ForCausalLM, style: Style, device: str, every: int) -> Scores:
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    questions = evaluate.load(HELDOUT, every)
    asked = set(prompts())

    results = evaluate.run_dialogues(questions, evaluate.greedy(model.to(device).eval(), tokenizer))
    right = [result.question.right(style.plain(result.answer)) for result in results]
    prose = [good for good, result in zip(right, results, strict=True) if demands_prose(result.question)]
    styled = [style.matches(result.answer) for result in results if result.question.turns[0] in asked]
    return Scores(_share(styled), _share(right), _share(prose))


def make(name: str, plan: Plan, base: Path, out: Path, facts: Facts, device: str, workers: int, every: int) -> None:
    """Train an adapter of the model in `base`. Writes it, its plan, loss curve and scores to a subfolder of `out`."""
    style = STYLES[name]
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    buckets = build(tokenizer, plan.seed, plan.shards, plan.per_shard, facts, workers, style)
    torch.manual_seed(plan.seed)
    model = _open(base)
    attach(model, RANKS[name])
    curve = fit(model, buckets, plan, device)
    save(model, RANKS[name], out / name)
    stored = _open(base)  # with the factors as stored, and without the compiled layers of the training
    attach(stored, RANKS[name])
    trained = factors(model)
    with torch.no_grad():
        for key, factor in factors(stored).items():
            factor.copy_(trained[key].bfloat16())
    result = asdict(scores(base, stored, style, device, every))
    print(name, json.dumps(result), flush=True)
    table = {"plan": asdict(plan), "torch": torch.__version__, "device": device, "scores": result, "curve": curve}
    (out / name / "training.json").write_text(json.dumps(table, indent=1) + "\n", "utf-8")


def _open(folder: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _share(marks: list[bool]) -> float:
    return round(sum(marks) / max(1, len(marks)), 4)
