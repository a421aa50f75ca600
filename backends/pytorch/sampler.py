"""Draws tokens from logits. Computes only the filters that a row of the batch needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...engine.batch import Batch, SampleSettings
from ...kernels.ops.sampling import Draws, Logprobs
from .device import Device
from .inputs import Sent


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token for each sample (see Batch)."""

    tokens: Tensor  # [samples] int64
    logprobs: Logprobs | None


def is_plain(batch: Batch) -> bool:
    """Whether no row of the batch has biases, penalties, a mask or log-probabilities."""
    return not _has_adjustments(batch) and not (batch.sampling.logprobs >= 0).any()


def _has_adjustments(batch: Batch) -> bool:
    rows = batch.sampling
    return bool(len(rows.bias_samples) or len(rows.history_samples) or len(batch.mask_samples))


def draw_plainly(logits: Tensor, settings: dict[str, Tensor], device: Device) -> Tensor:
    """[samples] int64, the tokens of a batch with `is_plain`. A captured step calls this function: it supports all
    settings, because the settings of a replay are not known at the capture."""
    return device.ops.sampling.draw(logits, _draws(settings, logits.shape[1]))


def sample(logits: Tensor, batch: Batch, sent: Sent, device: Device) -> Drawn:
    """Draw one token for each sample from logits [samples, vocab] float32, which may be overwritten."""
    rows = batch.sampling
    settings = sent.settings
    ops = device.ops.sampling
    top_count = int(rows.logprobs.max(initial=-1))  # likeliest tokens to list; -1: no log-probabilities
    raw = logits
    if _has_adjustments(batch):
        logits = logits.clone() if top_count >= 0 else logits
        _adjust(logits, batch, settings, device)
    max_k = _max_k(rows, logits.shape[1])
    tokens = ops.draw(logits, _draws(settings, max_k)) if rows.temperature.any() else ops.greedy(logits)
    return Drawn(tokens, ops.logprobs(raw, tokens, top_count) if top_count >= 0 else None)


def _adjust(logits: Tensor, batch: Batch, settings: dict[str, Tensor], device: Device) -> None:
    """Apply biases, penalties and masks to the logits in place."""
    rows = batch.sampling
    ops = device.ops.sampling

    def send(samples: NDArray[Any], *columns: NDArray[Any]) -> list[Tensor]:
        return [device.send(column) for column in (samples.astype(np.int64), *columns)]

    if len(rows.bias_samples):
        ops.bias(logits, *send(rows.bias_samples, rows.bias_tokens.astype(np.int64), rows.bias_values))
    if len(rows.history_samples):
        history = (rows.history_tokens.astype(np.int64), rows.history_prompt, rows.history_output)
        penalties = (settings[f"{name}_penalty"] for name in ("repetition", "presence", "frequency"))
        ops.penalise(logits, *send(rows.history_samples, *history), *penalties)
    if len(batch.mask_samples):
        ops.mask(logits, *send(batch.mask_samples, batch.masks.view(np.int32)))


def _max_k(rows: SampleSettings, vocab: int) -> int:
    """The value of Draws.max_k. A row with top_p and without top_k needs all logits in order."""
    is_random = rows.temperature > 0
    has_top_k = (rows.top_k > 0) & is_random
    needs_all = (rows.top_p < 1) & is_random & ~has_top_k
    if needs_all.any():
        return vocab
    return min(vocab, int(rows.top_k[has_top_k].max(initial=1)))


def _draws(settings: dict[str, Tensor], max_k: int) -> Draws:
    """The arguments of ops.sampling.draw. They always include all filters: a filter that is off costs nothing."""
    return Draws(
        temperature=settings["temperature"],
        seed_low=settings["seed_low"],
        seed_high=settings["seed_high"],
        position=settings["draw"],
        top_k=settings["top_k"],
        top_p=settings["top_p"],
        min_p=settings["min_p"],
        max_k=max_k,
    )
