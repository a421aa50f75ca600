"""Adapters as the engine sees them: a name, a version, a slot."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Adapter:
    """A value: the same name with other content is another adapter, so it can reuse neither slot nor KV."""

    name: str
    path: str
    version: str  # content hash


class AdapterPool:
    """Which adapters are known, and which of them lie in the runner's slots 1…num_slots.

    At most `at_once` different adapters are in use together, so that no step needs more. A slot in use is never
    given to another adapter; of the others, the least recently used one is.
    """

    def __init__(self, num_slots: int, at_once: int, load: Callable[[int, Adapter], None]) -> None:
        """`load(slot, adapter)` puts the weights there; whatever it raises leaves the slot empty."""
        self._at_once, self._load = min(at_once, num_slots), load
        self._known: dict[str, Adapter] = {}
        self._empty = list(range(num_slots, 0, -1))
        self._slots: dict[Adapter, int] = {}
        self._users: dict[Adapter, int] = {}
        self._unused: OrderedDict[Adapter, None] = OrderedDict()  # in a slot, least recently used first

    def register(self, adapter: Adapter) -> None:
        """Make an adapter known; another one of the same name is forgotten once its users are done."""
        self._known[adapter.name] = adapter

    def find(self, name: str) -> Adapter | None:
        return self._known.get(name)

    def acquire(self, adapter: Adapter) -> int | None:
        """The slot with the adapter's weights, to be released; None: too many others are in use. Raises as `load`."""
        if adapter not in self._users:
            if len(self._users) == self._at_once:
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
