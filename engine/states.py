"""Recurrent states: a slot for each running sequence, and snapshots of states for prefix hits."""

from __future__ import annotations

from collections import OrderedDict

from .pages import PendingCopies
from .radix import Node


class StatePool:
    """Slots 0…num_states - 1, and snapshots with the ids after them. -1 is no snapshot.

    The caller of `save` has the snapshot until it attaches the snapshot to a node of the prefix tree or drops it.
    """

    def __init__(self, num_states: int, num_snapshots: int) -> None:
        self.num_states = num_states
        self.copies = PendingCopies()
        self._free = list(range(num_states - 1, -1, -1))
        self._free_snapshots = list(range(num_states + num_snapshots - 1, num_states - 1, -1))
        self._nodes: OrderedDict[Node, None] = OrderedDict()  # nodes with a snapshot, least recently used first

    @property
    def num_used(self) -> int:
        """The number of slots that sequences use."""
        return self.num_states - len(self._free)

    @property
    def is_full(self) -> bool:
        """Whether the runner has states, and all slots are in use."""
        return 0 < self.num_states == self.num_used

    def allocate(self, node: Node) -> int:
        """A free slot. If the node has a snapshot, the snapshot is copied to the slot before the next step.

        Otherwise the contents of the slot are undefined: the runner begins a sequence at position 0 with the empty
        state.
        """
        state = self._free.pop()
        if node in self._nodes:
            self._nodes.move_to_end(node)
            self.copies.add(self.copies.source(node.snapshot), state)
        return state

    def release(self, state: int) -> None:
        self.copies.cancel(state)
        self._free.append(state)

    def save(self, state: int) -> int:
        """The id of a new snapshot of slot `state`, which is copied before the next step. -1 if no snapshot is free."""
        if not self._free_snapshots:
            return -1
        snapshot = self._free_snapshots.pop()
        self.copies.add(state, snapshot)
        return snapshot

    def attach(self, snapshot: int, node: Node) -> None:
        """Give the snapshot to a node. If the node already has a snapshot, the new one is freed."""
        if node.snapshot >= 0:
            self.drop(snapshot)
            return
        node.snapshot = snapshot
        self._nodes[node] = None

    def drop(self, snapshot: int) -> None:
        """Free the snapshot with this id; -1 is ignored."""
        if snapshot >= 0:
            self.copies.cancel(snapshot)
            self._free_snapshots.append(snapshot)

    def remove(self, node: Node) -> None:
        """Free the snapshot of a node, if it has one."""
        self._nodes.pop(node, None)
        self.drop(node.snapshot)
        node.snapshot = -1

    def evict(self) -> Node | None:
        """Make sure that a snapshot is free, if possible. Returns the node whose snapshot was evicted; None if a
        snapshot was free already, or if no node has one."""
        if self._free_snapshots or not self._nodes:
            return None
        node = next(iter(self._nodes))
        self.remove(node)
        return node

    def evict_all(self) -> None:
        """Free the snapshots of all nodes."""
        for node in list(self._nodes):
            self.remove(node)
