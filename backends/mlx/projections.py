"""The projections of mlx-lm's models: whatever multiplies by weights is reached here."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every projection by its path, plain or quantised, those of experts too: whatever multiplies by weights that an
    adapter may change or quantisation makes smaller is found here and nowhere else."""
    for path, module in model.named_modules():
        if hasattr(module, "to_quantized") or hasattr(module, "bits"):
            yield path, module


class Turned(nn.Linear):
    """A plain projection without bias whose weight lies ready as [inputs, outputs]: a step of a small model is as long
    as the operations it asks for, and turning the weight is one of two."""

    turned: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        return x @ self.turned


def turn_weights(model: nn.Module) -> None:
    """Make plain projections Turned. They share the weight's memory; whoever replaces a weight calls this again."""
    for _, module in linears(model):
        if type(module) in (nn.Linear, Turned) and "bias" not in module:
            turned = module.weight.T
            mx.eval(turned)
            object.__setattr__(module, "turned", turned)  # beside its weights, among which it would count twice
            module.__class__ = Turned
