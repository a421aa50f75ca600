"""One step as the layers of a model receive it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from .attention import Rows


@dataclass(frozen=True, slots=True)
class Cache:
    """The pages of all layers: one tensor where they have one shape, else one of each layer.

    keys and values [layers, pages, page_size, kv heads, dim], or a tuple of [pages, page_size, kv heads, dim].
    """

    keys: Tensor | tuple[Tensor, ...]
    values: Tensor | tuple[Tensor, ...]
    layers: tuple[tuple[Tensor, Tensor], ...] = field(init=False)  # views: key pages and value pages of each layer

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(zip(self.keys, self.values, strict=True)))


class Adapters(NamedTuple):
    """The adapters of a step in which any row has one."""

    slots: Tensor  # [tokens] int32: the adapter slot of each token; 0: none
    scales: Tensor  # [tokens] float32: the factor of the adapter's delta

    def select(self, tokens: Tensor) -> Adapters:
        """The adapters of tokens [selected] int32 alone."""
        return Adapters(self.slots.index_select(0, tokens), self.scales.index_select(0, tokens))


class Answers(NamedTuple):
    """The tokens whose hidden states are read after the last layer; it computes keys and values alone of all others."""

    tokens: Tensor  # [answers] int32
    rows: Rows  # of one query each


class LayerStep(NamedTuple):
    """Rows, cache positions, rotations, pages, adapters and answers of one step. A layer knows its own by index."""

    rows: Rows
    slots: Tensor  # [tokens] int64: where each token's key and value go, as in kv.store
    rotations: Sequence[tuple[Tensor, Tensor]]  # cos and sin [tokens, rotary_dim / 2] of each kind of rotation
    cache: Cache
    adapters: Adapters | None = None  # None: no row has one, and fused kernels may compute the step
    answers: Answers | None = None  # None: every token's; given to the last layer alone

    def answered(self) -> LayerStep:
        """The step of the answers' tokens alone, whose keys and values are in the cache already."""
        assert self.answers is not None
        tokens = self.answers.tokens
        adapters = None if self.adapters is None else self.adapters.select(tokens)
        return self._replace(rows=self.answers.rows, slots=self.slots[:0], adapters=adapters, answers=None)
