"""Tiny models for MLX, and mlx-lm's loop over them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from localllm.backends.mlx import families
from localllm.backends.mlx.architectures import is_described
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.runner import Runner

from .conformance import Conversation, Planned
from .tiny import TINIES, Tiny

SMALL = LoadOptions(context=128, cache_bytes=2**24, max_rows=16, page_size=8, dtype="float32")


SAME_BITS = not mx.cuda.is_available()  # on CUDA the order of a product's sums depends on the number of rows


def patched(target: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, value)
        yield


def no_memory(*_: object) -> None:
    """Stands for a function that allocates."""
    raise RuntimeError("[malloc] Unable to allocate 68719476736 bytes.")


MOE = {
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 12,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def as_published(config: dict[str, Any]) -> None:
    """Change config.json to the spelling of transformers 4, which mlx-lm reads."""
    ropes = config.pop("rope_parameters")
    config["rope_theta"] = ropes["rope_theta"]
    config["partial_rotary_factor"] = ropes.get("partial_rotary_factor", 1.0)
    config["num_experts"] = MOE["num_experts"]


DENSE = next(tiny for tiny in TINIES if tiny.label == "qwen3")


SLIDING = next(tiny for tiny in TINIES if tiny.label == "gemma3-old")  # mlx-lm reads a pattern, no layer_types


EXPERTS = Tiny("qwen3_moe", "qwen3_moe", MOE, rewrite=as_published)


KINDS = [DENSE, SLIDING, EXPERTS]


def plain_model(folder: Path) -> Any:
    """The model for mlx-lm's loop. test_mlx_families.py compares it with transformers."""
    config = read_model(folder).config
    if not is_described(config):
        return mlx_lm.utils.load_model(folder)[0]
    arguments, classes = families.arguments(config), families.classes(config, 128)
    return mlx_lm.utils.load_model(folder, model_config=arguments, get_model_classes=classes)[0]


@dataclass
class Loaded:
    """A tiny model on the MLX runner and in mlx-lm."""

    runner: Runner
    model: Any

    def plain(self, prompt: list[int], count: int) -> list[int]:
        """The tokens of mlx-lm's loop: one request with mlx-lm's caches, always the likeliest token."""
        caches, tokens = make_prompt_cache(self.model), list[int]()
        logits = self.model(mx.array([prompt]), cache=caches)[0, -1]
        for _ in range(count):
            tokens.append(int(mx.argmax(logits)))
            logits = self.model(mx.array([tokens[-1:]]), cache=caches)[0, -1]
        return tokens


def join_and_leave(
    loaded: Loaded, rng: np.random.Generator, *, overlap: bool, requests: int, joins: float, leaves: float = 0.0
) -> Conversation:
    """Compare each request with mlx-lm's loop. A step starts one with the probability `joins`, and cancels one with the
    probability `leaves`."""
    talk, prompts = Conversation(Planned(loaded.runner, overlap=overlap)), dict[str, list[int]]()
    waiting = [f"r{number}" for number in range(requests)]
    while waiting or talk.engine.has_work:
        if waiting and rng.random() < joins:
            name = waiting.pop()
            prompts[name] = rng.integers(3, 131, int(rng.integers(1, 50))).tolist()
            talk.submit(name, prompts[name], int(rng.integers(1, 40)))
        if rng.random() < leaves and talk.engine.has_work:
            talk.engine.cancel(str(rng.choice(list(prompts))))
        talk.step()
    for name, prompt in prompts.items():
        assert talk.tokens[name] == loaded.plain(prompt, len(talk.tokens[name])), name
    return talk


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))


def quantised(folder: Path, **how: Any) -> None:
    """Quantise the model in `folder` as mlx-lm's converter does."""
    model, config = mlx_lm.utils.load_model(folder)
    model, config = mlx_lm.utils.quantize_model(model, config, **how)
    mlx_lm.utils.save_model(folder, model)
    mlx_lm.utils.save_config(config, folder / "config.json")
