"""Test cases of the ops of sampling.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..sampling import Draws
from .case import Case, Make

ROWS = 6
VOCAB = 203


def _logits(generator: torch.Generator) -> Tensor:
    return torch.randn(ROWS, VOCAB, generator=generator) * 3.0


def _bias(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
    return {
        "logits": _logits(generator),
        "rows": torch.tensor([0, 3, 3, 5]),
        "tokens": torch.tensor([7, 1, 1, 202]),
        "values": torch.tensor([1.5, -100.0, 3.0, 100.0]),
    }


def _penalise(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
    return {
        "logits": _logits(generator),
        "rows": torch.tensor([0, 0, 2, 2, 5]),
        "tokens": torch.tensor([3, 9, 3, 202, 0]),
        "in_prompt": torch.tensor([1, 0, 2, 0, 0]),
        "in_output": torch.tensor([0, 2, 1, 5, 0]),
        "repetition": torch.tensor([1.3, 1.0, 0.7, 1.0, 1.0, 2.0]),
        "presence": torch.tensor([0.5, 0.0, -1.0, 0.0, 0.0, 1.0]),
        "frequency": torch.tensor([0.2, 0.0, 1.5, 0.0, 0.0, 1.0]),
    }


def _mask(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
    words = torch.randint(-(2**31), 2**31, (2, -(-VOCAB // 32)), generator=generator).to(torch.int32)
    return {"logits": _logits(generator), "rows": torch.tensor([1, 4]), "words": words}


def _draw(temperature: float, top_k: int | None, top_p: float | None, min_p: float | None) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        def filled(value: float | None, kind: torch.dtype) -> Tensor | None:
            return None if value is None else torch.full((ROWS,), value, dtype=kind)

        seeds = torch.randint(-(2**31), 2**31, (2, ROWS), generator=generator).to(torch.int32)
        heat = torch.full((ROWS,), temperature)
        heat[0] = 0.0
        position = torch.arange(ROWS, dtype=torch.int32) * 17
        filters = filled(top_k, torch.int32), filled(top_p, torch.float32), filled(min_p, torch.float32)
        return {
            "logits": _logits(generator),
            "draws": Draws(heat, seeds[0], seeds[1], position, *filters, max_k=top_k or VOCAB),
        }

    return make


def _logprobs(k: int) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        logits = _logits(generator).round()  # so that some logits are equal: the case tests their order
        return {"logits": logits, "tokens": torch.randint(VOCAB, (ROWS,), generator=generator), "k": k}

    return make


def _greedy(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
    return {"logits": _logits(generator).round()}


_FLOAT32 = {torch.float32: 2e-5}


def _carry(lens: list[int], rows: list[int]) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        tokens, drawn = torch.randint(0, 90, (2, sum(lens)), generator=generator, dtype=torch.int32)
        ends = torch.tensor(lens).cumsum(0).int() - 1
        return {"tokens": tokens, "ends": ends, "carried": torch.tensor(rows).int(), "drawn": drawn}

    return make


CASES = [
    Case("sampling.carry", "decode", _carry([1, 1, 1, 1], [2, 0, 1, 3]), mutates=("tokens",)),
    Case("sampling.carry", "some-unchanged", _carry([1, 5, 1], [1, -1, 0]), mutates=("tokens",)),
    Case("sampling.bias", "plain", _bias, _FLOAT32, mutates=("logits",)),
    Case("sampling.penalise", "plain", _penalise, _FLOAT32, mutates=("logits",)),
    Case("sampling.mask", "plain", _mask, _FLOAT32, mutates=("logits",)),
    Case("sampling.greedy", "ties", _greedy, _FLOAT32),
    Case("sampling.draw", "temperature", _draw(0.8, None, None, None), _FLOAT32),
    Case("sampling.draw", "top-k", _draw(1.0, 5, None, None), _FLOAT32),
    Case("sampling.draw", "top-p", _draw(1.5, None, 0.7, None), _FLOAT32),
    Case("sampling.draw", "min-p", _draw(1.0, None, None, 0.1), _FLOAT32),
    Case("sampling.draw", "all", _draw(1.2, 30, 0.9, 0.05), _FLOAT32),
    Case("sampling.logprobs", "none-listed", _logprobs(0), _FLOAT32),
    Case("sampling.logprobs", "listed", _logprobs(20), _FLOAT32),
]
