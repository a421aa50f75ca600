"""Draws for comparisons, and the tokens that the numpy oracle (engine/sampling.py) draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from localllm.engine import sampling as oracle
from localllm.kernels.ops.sampling import Draws

INF = float("inf")


def draws(rows: int, **filters: Any) -> Draws:
    generator = torch.Generator().manual_seed(rows)
    seeds = torch.randint(-(2**31), 2**31, (2, rows), generator=generator).to(torch.int32)
    settings = {"temperature": 1.0, "top_k": None, "top_p": None, "min_p": None} | filters
    heat, top_k, top_p, min_p = (
        None if value is None else torch.full((rows,), value, dtype=torch.int32 if name == "top_k" else torch.float32)
        for name, value in settings.items()
    )
    assert heat is not None
    return Draws(heat, seeds[0], seeds[1], torch.arange(rows, dtype=torch.int32), top_k, top_p, min_p, 0)


def expected_token(logits: torch.Tensor, how: Draws, row: int) -> int:
    """The token that the oracle draws, in float64 with sorted logits."""

    def column(values: torch.Tensor | None, off: float) -> np.ndarray:
        return np.full(len(logits), off) if values is None else values.double().numpy()

    class Rows:
        temperature, top_p, min_p = column(how.temperature, 0), column(how.top_p, 1), column(how.min_p, 0)
        top_k = column(how.top_k, 0).astype(int)
        seed = how.seed_low.numpy().view(np.uint32) + (how.seed_high.numpy().view(np.uint32).astype(np.uint64) << 32)
        draw = how.position.numpy()
        bias_samples = history_samples = np.empty(0, int)
        bias_tokens = history_tokens = history_prompt = history_output = np.empty(0, int)
        bias_values = np.empty(0)
        repetition_penalty, frequency_penalty, presence_penalty = np.ones(len(logits)), *np.zeros((2, len(logits)))

    rows: Any = Rows
    return oracle.draw(oracle.candidates(logits[row].numpy(), rows, row, None), rows, row)


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 40},
    {"top_k": 3000},
    {"top_p": 0.9},
    {"top_p": 0.001},
    {"temperature": 2.0, "top_p": 0.9999},
    {"min_p": 0.02},
    {"temperature": 1.3, "top_k": 500, "top_p": 0.95, "min_p": 0.001},
]
SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flat": lambda x: x,
    "peaked": lambda x: x * 4.0,
    "ties": lambda x: x.round(),
    "masked": lambda x: x.masked_fill(torch.arange(x.shape[1]) % 7 != 3, -INF),
    "one-left": lambda x: x.masked_fill(torch.arange(x.shape[1]) != x.shape[1] - 2, -INF),
    "all-equal": lambda x: x * 0.0,
}
