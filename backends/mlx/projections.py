"""The projections of mlx-lm's models: whatever multiplies by weights is reached here."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...kernels.mlx_cuda import tensor_cores
from ...kernels.mlx_cuda.few_rows import ROWS, product

# A kernel of ours computes products of few rows: on an H200 steps of 2, 8 and 16 rows gave 1.11, 1.17 and 1.17 times as
# many tokens a second (a shape of 0.6B; of 8B: 1.22, 1.16 and 1.20; 2026-11-22).
FEW_ROWS = tensor_cores.available()
# On CUDA a product of more than one row takes some 30 µs to prepare, however short: on an H200 with 84 fewer of them a
# step of 8 rows took 4.95 ms instead of 7.13, of 32 rows 5.34 instead of 8.58 (2026-11-22).
JOINS = mx.cuda.is_available()
ONE_INPUT = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")  # as mlx-lm names those that share theirs


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every projection by its path, plain or quantised, those of experts too: whatever multiplies by weights that an
    adapter may change or quantisation makes smaller is found here and nowhere else."""
    for path, module in model.named_modules():
        if hasattr(module, "to_quantized") or hasattr(module, "bits"):
            yield path, module


def _multiplied(x: mx.array, weight: mx.array, turned: mx.array) -> mx.array:
    """`turned` is the weight's transpose."""
    if FEW_ROWS and 1 < x.size // weight.shape[1] <= ROWS:  # asked here, as a step of one row asks a hundred times
        return product(x, weight, turned)
    return x @ turned


class Turned(nn.Linear):
    """A plain projection without bias whose weight lies ready as [inputs, outputs]: a step of a small model is as long
    as the operations it asks for, and turning the weight is one of two."""

    turned: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        return _multiplied(x, self.weight, self.turned)


class Product:
    """Several projections' products with one input, computed when the first of them is asked for.

    `weight` [outputs of all, inputs]: theirs lie in it. What nobody asks for is kept until there is another input.
    """

    def __init__(self, weight: mx.array, bounds: list[int]) -> None:
        self._weight, self._turned, self._bounds = weight, weight.T, bounds
        mx.eval(self._turned)
        self._x: mx.array | None = None
        self._parts: dict[int, mx.array] = {}  # that nobody has asked for yet

    def part(self, x: mx.array, at: int) -> mx.array:
        if x is not self._x or at not in self._parts:
            whole = _multiplied(x, self._weight, self._turned)
            self._x, self._parts = x, dict(enumerate(mx.split(whole, self._bounds, axis=-1)))
        found = self._parts.pop(at)
        if not self._parts:
            self._x = None
        return found


class Joined(nn.Linear):
    """A plain projection that has its part of a Product."""

    product: Product
    at: int

    def __call__(self, x: mx.array) -> mx.array:
        return self.product.part(x, self.at)


def turn_weights(model: nn.Module) -> None:
    """Make plain projections Turned, or Joined. They share the weight's memory; whoever replaces a weight calls this
    again."""
    plain = {
        id(module): module
        for _, module in linears(model)
        if type(module) in (nn.Linear, Turned, Joined) and "bias" not in module
    }
    for module in plain.values():
        turned = module.weight.T
        mx.eval(turned)
        object.__setattr__(module, "turned", turned)  # beside its weights, among which it would count twice
        module.__class__ = Turned
    if JOINS:
        for parent in model.modules():
            for names in ONE_INPUT:
                found = [parent[name] for name in names if name in parent]
                if len(found) == len(names) and all(id(module) in plain for module in found):
                    _join(found)
        mx.clear_cache()  # of weights as they lay before


def _join(modules: list[nn.Module]) -> None:
    weight = mx.concatenate([module.weight for module in modules])
    bounds = np.cumsum([len(module.weight) for module in modules])[:-1].tolist()
    product = Product(weight, bounds)
    for at, (module, own) in enumerate(zip(modules, mx.split(weight, bounds), strict=True)):
        mx.eval(own)
        module.weight = own
        object.__setattr__(module, "product", product)
        object.__setattr__(module, "at", at)
        object.__delattr__(module, "turned")
        module.__class__ = Joined
