"""Only the last token's hidden state of each row goes through a model's head: a prompt needs no other logits."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn


class _Tap:
    """What came out of the trunk last."""

    hidden: mx.array | None = None


class _LastToken:
    """Mixed into the class of a model's trunk."""

    tap: _Tap

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        hidden: mx.array = super().__call__(*args, **kwargs)[:, -1:]  # type: ignore[misc]
        self.tap.hidden = hidden
        return hidden


class Trunk:
    """A model's layers without its head, which mlx-lm keeps in `model`."""

    def __init__(self, model: nn.Module) -> None:
        self._tap: _Tap | None = None
        trunk = getattr(model, "model", None)
        if isinstance(trunk, nn.Module):
            self._tap = _Tap()
            # A subclass of its own: attributes that the head reads (embed_tokens) stay where they are.
            trunk.__class__ = type(type(trunk).__name__, (_LastToken, type(trunk)), {"tap": self._tap})

    def call(self, model: nn.Module, tokens: mx.array, caches: list[Any]) -> tuple[mx.array, mx.array]:
        """tokens [rows, new] -> logits and normalised hidden states of each row's last, [rows, vocab], [rows, hidden].

        Raises ValueError where the model hides its states: those are then its logits' business alone.
        """
        logits = model(tokens, cache=caches)[:, -1]
        if self._tap is None or self._tap.hidden is None:
            return logits, logits[:, :0]
        return logits, self._tap.hidden[:, -1]
