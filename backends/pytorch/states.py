"""The memory of the recurrent states: a slot for each running sequence, and snapshots for prefix hits."""

from __future__ import annotations

import torch

from ...engine.batch import Ints
from ...engine.files.recurrent_config import StateShapes
from ...kernels.ops.scan import LayerStates
from .copies import copy_entries
from .device import Device

COPY_STATES = 4  # number of states, of all layers together, that are copied at a time


class States:
    """The tensors `conv` [layers, entries, width - 1, channels] and `scan` [layers, entries, heads, key dim, value
    dim], float32. The entries are the slots of RunnerSpec.num_states, then the snapshots.

    They are not cleared, so the system maps memory only for used entries. A sequence begins with the empty state,
    whatever its slot has.
    """

    def __init__(self, shapes: StateShapes, layers: int, entries: int, device: str) -> None:
        self.conv = torch.empty(layers, entries, *shapes.conv, device=device)
        self.scan = torch.empty(layers, entries, *shapes.scan, device=device)
        self.layers = tuple(LayerStates(*layer) for layer in zip(self.conv, self.scan, strict=True))
        # With the dimensions of pages; see kv.copy_pages. Without the tensors that have no values.
        self._copied = [each for each in (self.conv.unsqueeze(3), self.scan) if each.numel()]

    def copy(self, copies: Ints, device: Device) -> None:
        """Copy states by `copies` [copies, 2], rows of (source, target). All sources are read before any write."""
        copy_entries(self._copied, copies, COPY_STATES, device)
