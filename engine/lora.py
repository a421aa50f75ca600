"""Adapters in the engine: names, versions and adapter slots."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from .errors import RequestRefused


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter version. The same name with other content is another adapter, with its own slot and KV."""

    name: str
    path: str
    version: str  # SHA-256 of the adapter's content


Namespace: TypeAlias = tuple[Adapter, float] | None  # adapter and scale; None: the base model


class AdapterPool:
    """The registered adapters, and the adapter in each slot 1…num_slots of the runner.

    At most `max_active` adapters are in use or being loaded at a time, so that no step needs more. An adapter that is
    in use, being loaded or pinned keeps its slot. Of the other slots, the least recently used one gets the next
    adapter. Not thread-safe.
    """

    def __init__(
        self,
        num_slots: int,
        max_active: int,
        load: Callable[[int, Adapter], None],
        forget: Callable[[Adapter], None] = lambda adapter: None,
    ) -> None:
        """`load(slot, adapter)` starts to load the weights into the slot. When the load has ended, which may be before
        `load` returns, its owner calls `loaded`. `forget(adapter)` frees the main memory of an adapter that no request
        can use any more, if it has any."""
        self._max_active = min(max_active, num_slots)
        self._load = load
        self._forget = forget
        self._registered: dict[str, Adapter] = {}
        self._pinned: set[str] = set()
        self._requests: Counter[Adapter] = Counter()  # number of unfinished requests and registrations of each adapter
        self._empty = list(range(num_slots, 0, -1))
        self._slots: dict[Adapter, int] = {}
        self._loading: set[Adapter] = set()  # adapters whose slot is not complete yet
        self._errors: dict[Adapter, Exception] = {}  # why the last load failed, for the request that needs the adapter
        self._users: Counter[Adapter] = Counter()  # number of requests that need the slot now; no adapter with 0
        # Adapters that are loaded and have no user, least recently used first.
        self._unused: OrderedDict[Adapter, None] = OrderedDict()

    @property
    def is_loading(self) -> bool:
        """Whether a load is in progress."""
        return bool(self._loading)

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
        if not self._requests[adapter]:
            self._errors.pop(adapter, None)  # the request of a failed load may have ended before the load
        self._requests[adapter] += 1

    def end(self, adapter: Adapter) -> None:
        self._requests[adapter] -= 1
        if not self._requests[adapter]:
            self._errors.pop(adapter, None)
        self._drop_if_unused(adapter)

    def acquire(self, adapter: Adapter) -> int | None:
        """The slot of the adapter, whose weights are complete. Call `release` later.

        None: too many adapters are in use, or the load of this one has not ended; acquire it again later. Raises the
        error of a load that failed.
        """
        if adapter not in self._users:
            is_loaded = adapter not in self._errors and self._is_loaded(adapter)
            if adapter in self._errors:
                raise self._errors.pop(adapter)
            if not is_loaded:
                return None
            del self._unused[adapter]
        self._users[adapter] += 1
        return self._slots[adapter]

    def release(self, adapter: Adapter) -> None:
        """End a use of the slot: no step that is still computed reads it for this user."""
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]
            self._unused[adapter] = None
            self._drop_if_unused(adapter)

    def loaded(self, adapter: Adapter, error: Exception | None = None) -> None:
        """Record the end of a load that the pool started. `error`: the reason if it failed; then the slot is empty."""
        self._loading.remove(adapter)
        if error is None:
            self._unused[adapter] = None
        else:
            self._empty.append(self._slots.pop(adapter))
            self._errors[adapter] = error
        self._drop_if_unused(adapter)

    def _is_loaded(self, adapter: Adapter) -> bool:
        """Whether an adapter without users may be used now. If it has no slot, its load is started."""
        if adapter in self._loading or len(self._users) + len(self._loading) >= self._max_active:
            return False
        if adapter not in self._slots:
            self._start_load(adapter)
        return adapter in self._unused

    def _start_load(self, adapter: Adapter) -> None:
        """Load the adapter into a free slot, unless all slots are in use or pinned."""
        if not self._empty:
            evicted = self._find_evictable()
            if evicted is None:
                return
            del self._unused[evicted]
            self._empty.append(self._slots.pop(evicted))
        slot = self._empty.pop()
        self._slots[adapter] = slot
        self._loading.add(adapter)
        self._load(slot, adapter)

    def _find_evictable(self) -> Adapter | None:
        for adapter in self._unused:
            if adapter.name not in self._pinned or self._registered.get(adapter.name) != adapter:
                return adapter
        return None

    def _drop_if_unused(self, adapter: Adapter) -> None:
        """Free the slot and the weights of an adapter that is not registered, has no more requests, and is neither in
        use nor being loaded."""
        if self._requests[adapter] or self._registered.get(adapter.name) == adapter:
            return
        if adapter in self._users or adapter in self._loading:
            return
        del self._requests[adapter]
        self._errors.pop(adapter, None)
        self._unused.pop(adapter, None)
        if adapter in self._slots:
            self._empty.append(self._slots.pop(adapter))
        self._forget(adapter)


def fitting_slots(requested: int, slot_bytes: int, free: int) -> int:
    """The number of adapter slots, at most `requested`, that fit into `free` bytes together with slot 0, which takes
    `slot_bytes` bytes like each other slot."""
    return max(0, min(requested, free // max(slot_bytes, 1) - 1))


def slots_hint(requested: int, slot_bytes: int) -> str:
    """The way to get adapter slots, for a model that has none. `requested`: the setting adapter_slots."""
    if not requested:
        return "raise the setting adapter_slots"
    needed = -(-2 * slot_bytes // 2**20)
    return (
        f"the memory beside the weights and the KV cache has less than the {needed} MiB that adapters need: set "
        "cache_mib or adapter_rank to a smaller value"
    )
