"""The arguments of one step that the layers of a model receive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from .attention import Rows
from .scan import LayerStates, RunScan, run_scan
from .state import StateRows
from .streams import IN_ORDER, Streams


@dataclass(frozen=True, slots=True)
class Cache:
    """The pages of all layers: one tensor if all layers have the same shape, else one tensor per layer.

    keys and values [layers, pages, page_size, kv heads, dim], or a tuple of [pages, page_size, kv heads, dim]. A latent
    cache has no values: they are columns of its keys. If the device has latent_parts, its keys are the rotated keys,
    and its values are the latents.
    """

    keys: Tensor | tuple[Tensor, ...]
    values: Tensor | tuple[Tensor, ...] | None
    # [layers, 2, pages, kv heads, page_size] float32, or a tuple of [2, …]: of int8 keys and values
    scales: Tensor | tuple[Tensor, ...] | None = None
    groups: tuple[int, ...] = ()  # index of each layer's cache group; empty: all layers are in group 0
    states: tuple[LayerStates, ...] = ()  # of each layer with a recurrent state
    # Views: key pages and value pages of each layer; in a latent cache of one part the key pages only.
    layers: tuple[tuple[Tensor, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        parts = [self.keys] if self.values is None else [self.keys, self.values]
        object.__setattr__(self, "layers", tuple(zip(*parts, strict=True)))

    def layer_scales(self, index: int) -> Tensor | None:
        """The scales [2, pages, kv heads, page_size] of a layer; None: its pages are floats."""
        return None if self.scales is None else self.scales[index]


class Tiles(NamedTuple):
    """The tokens that have an adapter, grouped into tiles of at most `chunk` tokens of one adapter slot (chunked
    segments, as in S-LoRA and SGLang's csgmv). An unused tile is empty."""

    order: Tensor  # [tokens] int32: indices of tokens, tile after tile; tokens without an adapter come last
    starts: Tensor  # [tiles + 1] int32: tile i has the tokens order[starts[i]] … order[starts[i + 1] - 1]
    slots: Tensor  # [tiles] int32, adapter slot of each tile
    chunk: int


class Adapters(NamedTuple):
    """The adapters of a step; at least one row has an adapter."""

    slots: Tensor  # [tokens] int32, adapter slot of each token; 0: no adapter
    scales: Tensor  # [tokens] float32, factor of the adapter's LoRA product; 0 where the slot is 0
    used: tuple[int, ...]  # slots other than 0 that `slots` may contain: those of the step; in a capture, all slots
    # (first token, end, slot) of each run of tokens with the same adapter slot; None in a capture
    segments: tuple[tuple[int, int, int], ...] | None = None
    tiles: Tiles | None = None


class HeadStep(NamedTuple):
    """The arguments of one step that the output head receives."""

    adapters: Adapters | None  # adapters of the tokens that the head computes


class SampledRows(NamedTuple):
    """The tokens whose hidden states are read after the last layer. For other tokens the last layer computes only keys
    and values."""

    tokens: Tensor  # [sampled rows] int32
    rows: Rows  # one row per token, with one query
    adapters: Adapters | None = None  # adapters of these tokens; None: no token has an adapter


class Places(NamedTuple):
    """The places of a step's tokens in the pages of one cache group."""

    rows: Rows
    slots: Tensor  # [tokens] int64, cache slots for the keys and values, as in kv.store
    sampled: Rows | None = None  # rows of the sampled tokens, as in SampledRows


class LayerStep(NamedTuple):
    """Rows, cache slots, rotations, pages, adapters, sampled rows, streams and query factors of one step. A layer
    selects its rotation and its pages by index."""

    rows: Rows
    slots: Tensor  # [tokens] int64, cache slots for the keys and values, as in kv.store
    rotations: Sequence[tuple[Tensor, Tensor]]  # cos and sin [tokens, rotary_dim / 2] of each kind of rotation
    cache: Cache
    adapters: Adapters | None = None  # None: no row has an adapter, so fused kernels may compute the step
    sampled: SampledRows | None = None  # None: outputs of all tokens; only the last layer receives SampledRows
    streams: Streams = IN_ORDER  # a second stream for work that a layer may compute in parallel
    # [tokens, 1] factor of each token's queries, in their dtype; None: all factors are 1
    query_factors: Tensor | None = None
    # Places in the cache groups 1, 2, …; `rows`, `slots` and `sampled` belong to group 0. Only `decoders` receives
    # them: the step that a layer receives has the places of the layer's group.
    other_places: tuple[Places, ...] = ()
    state_rows: StateRows | None = None  # None: no layer has a recurrent state, or the step is traced
    run_scan: RunScan = run_scan
    layer_inputs: Tensor | None = None  # [layers, tokens, dim] an input of its own for each layer

    @property
    def is_plain(self) -> bool:
        """Whether the step has no adapters, sampled rows and query factors, which few fused kernels support."""
        return self.adapters is None and self.sampled is None and self.query_factors is None

    def of_groups(self) -> tuple[LayerStep, ...]:
        """For each cache group, the step that a layer of this group receives."""
        first = self._replace(other_places=()) if self.other_places else self
        return first, *[first._at(places) for places in self.other_places]

    def _at(self, places: Places) -> LayerStep:
        sampled = self.sampled
        if sampled is not None and places.sampled is not None:
            sampled = sampled._replace(rows=places.sampled)
        return self._replace(rows=places.rows, slots=places.slots, sampled=sampled)

    def only_sampled(self) -> LayerStep:
        """The step reduced to the tokens of `sampled`, whose keys and values are in the cache already."""
        assert self.sampled is not None
        tokens, rows, adapters = self.sampled
        inputs = None if self.layer_inputs is None else self.layer_inputs.index_select(1, tokens)
        return self._replace(rows=rows, slots=self.slots[:0], adapters=adapters, sampled=None, layer_inputs=inputs)
