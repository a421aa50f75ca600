"""Only one token's hidden state of each row goes through a model's head: a prompt needs no other logits."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn


class _Tap:
    """What came out of the trunk last, of one token a row, and which it is to be."""

    hidden: mx.array | None = None
    token: int | mx.array = 0  # [rows], where they differ


class _OneToken:
    """Mixed into the class of a model's trunk."""

    tap: _Tap

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        self.tap.hidden = hidden = _one(super().__call__(*args, **kwargs), self.tap.token)  # type: ignore[misc]
        return hidden


def _one(x: mx.array, token: int | mx.array) -> mx.array:
    """[rows, tokens, dim] -> [rows, 1, dim]"""
    if isinstance(token, int):
        return x[:, token : token + 1]
    return mx.take_along_axis(x, token[:, None, None], axis=1)


class Trunk:
    """A model's layers without its head, which mlx-lm keeps in `model`."""

    def __init__(self, model: nn.Module) -> None:
        self._tap: _Tap | None = None
        trunk = getattr(model, "model", None)
        if isinstance(trunk, nn.Module):
            self._tap = _Tap()
            # A subclass of its own: attributes that the head reads (embed_tokens) stay where they are.
            trunk.__class__ = type(type(trunk).__name__, (_OneToken, type(trunk)), {"tap": self._tap})

    def call(
        self, model: nn.Module, tokens: mx.array, caches: list[Any], token: int | mx.array
    ) -> tuple[mx.array, mx.array]:
        """tokens [rows, new] -> logits [rows, vocab] and normalised hidden states [rows, hidden] of each row's `token`.

        Where the model hides its states there are none: [rows, 0].
        """
        if self._tap is not None:
            self._tap.token = token
        logits = model(tokens, cache=caches)
        if self._tap is None or self._tap.hidden is None:
            logits = _one(logits, token)[:, 0]
            return logits, logits[:, :0]
        hidden, self._tap.hidden = self._tap.hidden, None  # kept, it would keep what a step that failed computed
        return logits[:, 0], hidden[:, 0]
