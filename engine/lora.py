"""Adapters in the engine: names, versions and adapter slots."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter version. The same name with other content is another adapter, with its own slot and KV."""

    name: str
    path: str
    version: str  # content hash


class AdapterPool:
    """The registered adapters, and the adapter in each slot 1…num_slots of the runner.

    At most `max_active` adapters are in use at a time, so that no step needs more. An adapter in use keeps its slot;
    otherwise the least recently used slot is reassigned.
    """

    def __init__(self, num_slots: int, max_active: int, load: Callable[[int, Adapter], None]) -> None:
        """`load(slot, adapter)` loads the weights into the slot. If it raises, the slot stays empty."""
        self._max_active = min(max_active, num_slots)
        self._load = load
        self._registered: dict[str, Adapter] = {}
        self._empty = list(range(num_slots, 0, -1))
        self._slots: dict[Adapter, int] = {}
        self._users: dict[Adapter, int] = {}
        self._unused: OrderedDict[Adapter, None] = OrderedDict()  # in a slot, least recently used first

    def register(self, adapter: Adapter) -> None:
        """Register an adapter. It replaces an adapter of the same name, which requests in progress still use."""
        self._registered[adapter.name] = adapter

    def find(self, name: str) -> Adapter | None:
        return self._registered.get(name)

    def acquire(self, adapter: Adapter) -> int | None:
        """The slot with the adapter; release it later. None: too many adapters are in use. Raises as `load` does."""
        if adapter not in self._users:
            if len(self._users) == self._max_active:
                return None
            if adapter not in self._slots:
                self._fill_slot(adapter)
            self._unused.pop(adapter, None)
        self._users[adapter] = self._users.get(adapter, 0) + 1
        return self._slots[adapter]

    def release(self, adapter: Adapter) -> None:
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]
            self._unused[adapter] = None

    def _fill_slot(self, adapter: Adapter) -> None:
        if not self._empty:
            evicted, _ = self._unused.popitem(last=False)
            self._empty.append(self._slots.pop(evicted))
        slot = self._empty[-1]
        self._load(slot, adapter)
        self._slots[adapter] = self._empty.pop()
