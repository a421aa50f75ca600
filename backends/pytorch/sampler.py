"""From logits to tokens. Only the filters that a row of the batch needs are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...engine.batch import AnswerSampling, Batch
from ...kernels.ops.sampling import Draws, Logprobs
from .device import Device
from .inputs import Sent


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token for each answer."""

    tokens: Tensor  # [answers] int64
    logprobs: Logprobs | None


def is_plain(batch: Batch) -> bool:
    """Whether the draw needs only logits and one value of each setting a row, and the step gives tokens alone."""
    rows = batch.sampling
    lists = len(rows.bias_answers) or len(rows.history_answers) or len(batch.mask_answers)
    return not lists and not (rows.logprobs >= 0).any()


def draw_plainly(logits: Tensor, settings: dict[str, Tensor], device: Device) -> Tensor:
    """[answers] int64 tokens of a plain batch, whatever its settings are: for steps that are captured before these are
    known."""
    return device.ops.sampling.draw(logits, _draws(settings, logits.shape[1]))


def sample(logits: Tensor, batch: Batch, sent: Sent, device: Device) -> Drawn:
    """logits [answers, vocab] float32, which may be written over."""
    rows = batch.sampling
    settings = sent.settings
    ops = device.ops.sampling
    listed = int(rows.logprobs.max(initial=-1))
    raw = logits
    if len(rows.bias_answers) or len(rows.history_answers) or len(batch.mask_answers):
        logits = logits.clone() if listed >= 0 else logits
        _adjust(logits, batch, settings, device)
    max_k = _max_k(rows, logits.shape[1])
    tokens = ops.draw(logits, _draws(settings, max_k)) if rows.temperature.any() else ops.greedy(logits)
    return Drawn(tokens, ops.logprobs(raw, tokens, listed) if listed >= 0 else None)


def _adjust(logits: Tensor, batch: Batch, settings: dict[str, Tensor], device: Device) -> None:
    rows = batch.sampling
    ops = device.ops.sampling

    def send(answers: NDArray[Any], *columns: NDArray[Any]) -> list[Tensor]:
        return [device.send(column) for column in (answers.astype(np.int64), *columns)]

    owners, tokens, values = send(rows.bias_answers, rows.bias_tokens.astype(np.int64), rows.bias_values)
    if len(owners):
        ops.bias(logits, owners, tokens, values)
    history = (rows.history_tokens.astype(np.int64), rows.history_prompt, rows.history_output)
    owners, *entries = send(rows.history_answers, *history)
    if len(owners):
        penalties = (settings[f"{name}_penalty"] for name in ("repetition", "presence", "frequency"))
        ops.penalise(logits, owners, *entries, *penalties)
    owners, words = send(batch.mask_answers, batch.masks.view(np.int32))
    if len(owners):
        ops.mask(logits, owners, words)


def _max_k(rows: AnswerSampling, vocab: int) -> int:
    """See Draws.max_k: a row with top_p and no top_k may need all values in order, other rows their top_k."""
    heated = rows.temperature > 0
    limited = (rows.top_k > 0) & heated
    if ((rows.top_p < 1) & heated & ~limited).any():
        return vocab
    return min(vocab, int(rows.top_k[limited].max(initial=1)))


def _draws(settings: dict[str, Tensor], max_k: int) -> Draws:
    """With all filters, those that are off for every row too: they cost nothing, and kernels are of one kind."""
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
