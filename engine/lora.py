"""Adapters in the engine: names, versions and adapter slots."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from .errors import RequestRefused


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter version. The same name with other content is another adapter, with its own slot and KV."""

    name: str
    path: str
    version: str  # SHA-256 of the adapter's content


class AdapterPool:
    """The registered adapters, and the adapter in each slot 1…num_slots of the runner.

    At most `max_active` adapters are in use at a time, so that no step needs more. An adapter that is in use or pinned
    keeps its slot. Of the other slots, the least recently used one gets the next adapter.
    """

    def __init__(
        self,
        num_slots: int,
        max_active: int,
        load: Callable[[int, Adapter], None],
        forget: Callable[[Adapter], None] = lambda adapter: None,
    ) -> None:
        """`load(slot, adapter)` loads the weights into the slot. If it raises, the slot stays empty. `forget(adapter)`
        frees the main memory of an adapter that no request can use any more, if it has any."""
        self._max_active = min(max_active, num_slots)
        self._load = load
        self._forget = forget
        self._registered: dict[str, Adapter] = {}
        self._pinned: set[str] = set()
        self._requests: Counter[Adapter] = Counter()  # number of unfinished requests and registrations of each adapter
        self._empty = list(range(num_slots, 0, -1))
        self._slots: dict[Adapter, int] = {}
        self._users: Counter[Adapter] = Counter()  # for each adapter: number of requests that need its slot now
        # Adapters that have a slot and no user, least recently used first.
        self._unused: OrderedDict[Adapter, None] = OrderedDict()

    @property
    def registered(self) -> tuple[Adapter, ...]:
        """The registered adapters, in the order of their registration."""
        return tuple(self._registered.values())

    def register(self, adapter: Adapter, *, pinned: bool = False) -> None:
        """Register an adapter. It replaces an adapter of the same name, which requests in progress still use.

        Raises RequestRefused if no slot would be left for adapters that are not pinned.
        """
        if pinned and len(self._pinned | {adapter.name}) >= self._max_active:
            raise RequestRefused(
                f"adapter {adapter.name!r} cannot be pinned: of {self._max_active} adapter slots, "
                f"{len(self._pinned)} are pinned and one must stay free"
            )
        previous = self._registered.get(adapter.name)
        self._registered[adapter.name] = adapter
        self._pinned.discard(adapter.name)
        if pinned:
            self._pinned.add(adapter.name)
        if previous is not None and previous != adapter:
            self._drop_if_unused(previous)

    def unregister(self, name: str) -> Adapter | None:
        """Accept no more requests for this adapter. Requests in progress still use it. Returns None if no adapter has
        this name."""
        adapter = self._registered.pop(name, None)
        self._pinned.discard(name)
        if adapter is not None:
            self._drop_if_unused(adapter)
        return adapter

    def find(self, name: str) -> Adapter | None:
        return self._registered.get(name)

    def begin(self, adapter: Adapter) -> None:
        """Count one more request or registration in progress. It keeps the adapter in memory until `end` is called."""
        self._requests[adapter] += 1

    def end(self, adapter: Adapter) -> None:
        self._requests[adapter] -= 1
        self._drop_if_unused(adapter)

    def acquire(self, adapter: Adapter) -> int | None:
        """The slot of the adapter, which is loaded if necessary. Call `release` later. None: too many adapters are in
        use. Raises the errors of `load`."""
        if not self._users[adapter]:
            if len(self._busy() | {adapter}) > self._max_active:
                return None
            if adapter not in self._slots and not self._fill_slot(adapter):
                return None
            self._unused.pop(adapter, None)
        self._users[adapter] += 1
        return self._slots[adapter]

    def release(self, adapter: Adapter) -> None:
        self._users[adapter] -= 1
        if not self._users[adapter]:
            self._unused[adapter] = None

    def _busy(self) -> set[Adapter]:
        return {adapter for adapter, count in self._users.items() if count}

    def _fill_slot(self, adapter: Adapter) -> bool:
        """Load the adapter into a free slot. Returns False if all slots are in use or pinned."""
        if not self._empty:
            evicted = self._find_evictable()
            if evicted is None:
                return False
            del self._unused[evicted]
            self._empty.append(self._slots.pop(evicted))
        slot = self._empty[-1]
        self._load(slot, adapter)
        self._slots[adapter] = self._empty.pop()
        return True

    def _find_evictable(self) -> Adapter | None:
        for adapter in self._unused:
            if adapter.name not in self._pinned or self._registered.get(adapter.name) != adapter:
                return adapter
        return None

    def _drop_if_unused(self, adapter: Adapter) -> None:
        """Free the slot and the weights of an adapter that is not registered and has no more requests."""
        if self._requests[adapter] or self._registered.get(adapter.name) == adapter:
            return
        del self._requests[adapter]
        self._users.pop(adapter, None)
        self._unused.pop(adapter, None)
        if adapter in self._slots:
            self._empty.append(self._slots.pop(adapter))
        self._forget(adapter)
