"""Calls for few new tokens of each row: a prompt behind what is there, its last part, or a short one.

A hit in a small model takes as long as Python takes to ask for its operations. So what is asked for is kept, for rows
and caches of one shape: MLX traces the model once, and from then on is handed arrays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ...kernels.mlx_cuda.few_store import store
from ...kernels.mlx_cuda.few_tokens import shared_as
from .attention import Ragged, SeenByFew, Unread
from .caches import Group, LayerCache, LayerShape, by_group, handed_on
from .rotary import LATER, Unturned
from .trunk import Trunk

TRACES = 64  # shapes that are remembered; what is traced of one names some thousand operations


class Held(NamedTuple):
    """What a call reads of a group, and replaces."""

    keys: list[mx.array]  # of each layer: [rows, kv heads, columns, dim]
    values: list[mx.array]
    firsts: mx.array  # [rows] int32: columns before each row's first position
    end: mx.array  # [1] int32: the column behind the last that is written


class Answer(NamedTuple):
    logits: mx.array  # [rows, vocab]
    hidden: mx.array  # [rows, hidden]; [rows, 0] where the model hides its states
    held: list[Held]


class Shape(NamedTuple):
    """What an answer depends on, but for numbers."""

    new: int  # tokens of each row
    groups: tuple[tuple[int, int, int], ...]  # rows, columns, and how many of those a row sees, as few_tokens splits it


Call = Callable[[mx.array, mx.array, list[Held]], Answer]  # tokens [rows, new]; [rows]: which of them is the last


class FewCalls:
    """Calls of one model, whose layers take LATER for an offset. What is traced names the weights as they are, and is
    forgotten by the thread that calls, or with it."""

    def __init__(self, model: nn.Module, trunk: Trunk, shapes: Sequence[LayerShape]) -> None:
        self._answer = partial(_answer, model, trunk, [shape.window for shape in shapes])
        self._met: OrderedDict[Shape, Call | None] = OrderedDict()  # the latest last; None: once
        self._traces = True

    def call(self, groups: list[Group], new: list[int], tokens: mx.array) -> tuple[mx.array, mx.array]:
        """tokens [rows, filled], `new` of them each group's own -> logits and hidden states of the last of those."""
        filled = tokens.shape[1]
        held, lasts, shapes = list[Held](), list[int](), list[tuple[int, int, int]]()
        for group, count in zip(groups, new, strict=True):
            end, rows = group.reserve(filled), len(group.padding)
            held.append(Held(group.keys, group.values, mx.array(group.padding, mx.int32), mx.array([end], mx.int32)))
            shapes.append((rows, group.columns, shared_as(end - min(group.padding))))
            lasts += [count - 1] * rows
        found = self._answered(Shape(filled, tuple(shapes)), tokens, mx.array(lasts), held)
        for group, count, own in zip(groups, new, found.held, strict=True):
            group.keys, group.values = own.keys, own.values
            group.end += count
        return found.logits, found.hidden

    def _answered(self, shape: Shape, *given: Any) -> Answer:
        """A shape is traced where it comes a second time: that takes longer than to ask once."""
        plain: Call = partial(self._answer, shape)
        again, traced = shape in self._met, self._met.pop(shape, None)
        if again and traced is None and self._traces:
            traced = mx.compile(plain)
        self._met[shape] = traced
        if len(self._met) > TRACES:
            self._met.popitem(last=False)
        if traced is not None:
            try:
                return traced(*given)
            except ValueError as error:
                if "transformations" not in str(error):
                    raise
                self._traces, self._met[shape] = False, None  # a model that looks at what it computes
        return plain(*given)


def _answer(
    model: nn.Module,
    trunk: Trunk,
    windows: list[int],
    shape: Shape,
    tokens: mx.array,
    last: mx.array,
    held: list[Held],
) -> Answer:
    caches = _Caches(shape, [Held(list(own.keys), list(own.values), own.firsts, own.end) for own in held])
    layers = [LayerCache(caches, layer, window, handed_on) for layer, window in enumerate(windows)]
    return Answer(*trunk.call(model, tokens, layers, last), caches.held)


class _Caches:
    """See caches.Step. Numbers are the device's alone."""

    offset = LATER

    def __init__(self, shape: Shape, held: list[Held]) -> None:
        self._shape, self.held = shape, held
        rows = [rows for rows, *_ in shape.groups]
        self._bounds = [sum(rows[:at]) for at in range(1, len(rows))]

    def mask(self, window: int, as_array: bool) -> Any:
        masks = [
            SeenByFew(own.firsts, own.end, longest, self._shape.new, window)
            for own, (*_, longest) in zip(self.held, self._shape.groups, strict=True)
        ]
        return masks[0] if len(masks) == 1 else Ragged(masks)

    def store(self, layer: int, queries: Unturned, keys: mx.array, values: mx.array) -> tuple[mx.array, Any, Any]:
        """Write a layer's new keys and values -> its queries, turned, and all keys and values."""
        return by_group(self._store, self._bounds, layer, queries, keys, values)

    def _store(
        self, at: int, layer: int, queries: Unturned, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, Any, Any]:
        own, columns = self.held[at], self._shape.groups[at][1]
        turned, own.keys[layer], own.values[layer] = store(
            queries.x, keys, values, own.keys[layer], own.values[layer], own.firsts, own.end, queries.rope
        )
        return turned, Unread(own.keys[layer], columns), Unread(own.values[layer], columns)
