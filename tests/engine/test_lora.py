from __future__ import annotations

import pytest

from localllm.engine.errors import ModelRefused, RequestRefused
from localllm.engine.lora import Adapter, AdapterPool, fitting_slots

A, B, C = (Adapter(name, f"/{name}", "1") for name in "abc")


class Loads:
    """Pools whose loads end at once, or with `end` if `delayed` is set. It records the loads and the freed adapters."""

    def __init__(self, num_slots: int, max_active: int, *, delayed: bool = False) -> None:
        self.loads: list[tuple[int, Adapter]] = []
        self.forgotten: list[Adapter] = []
        self.broken = frozenset[str]()  # names of the adapters whose load fails
        self.pool = AdapterPool(num_slots, max_active, self._load, self.forgotten.append)
        self._delayed = delayed
        for adapter in (A, B, C):
            self.pool.register(adapter)

    def _load(self, slot: int, adapter: Adapter) -> None:
        self.loads.append((slot, adapter))
        if not self._delayed:
            self.end(adapter)

    def end(self, adapter: Adapter) -> None:
        error = ModelRefused(f"{adapter.path} does not fit") if adapter.name in self.broken else None
        self.pool.loaded(adapter, error)


def test_a_new_version_replaces_an_adapter_of_the_same_name() -> None:
    pool = Loads(2, 2).pool
    assert pool.find("a") == A
    assert pool.find("d") is None
    newer = Adapter("a", "/a", "2")
    pool.register(newer)
    assert pool.find("a") == newer


def test_slots_count_from_one_and_are_loaded_once() -> None:
    loads = Loads(2, 2)
    pool = loads.pool
    assert [pool.acquire(A), pool.acquire(B), pool.acquire(A)] == [1, 2, 1]
    assert loads.loads == [(1, A), (2, B)]


def test_the_least_recently_used_free_adapter_is_evicted() -> None:
    loads = Loads(2, 2)
    pool = loads.pool
    for adapter in (A, B, A):
        pool.acquire(adapter)
    assert pool.acquire(C) is None
    pool.release(A)
    assert pool.acquire(C) is None  # A has one more user
    pool.release(B)
    pool.release(A)
    assert pool.acquire(C) == 2  # B was let go of before A
    assert pool.acquire(A) == 1
    assert loads.loads == [(1, A), (2, B), (2, C)]


def test_one_that_is_used_again_is_not_evicted() -> None:
    pool = Loads(2, 2).pool
    for adapter in (A, B):
        pool.acquire(adapter)
        pool.release(adapter)
    assert pool.acquire(A) == 1
    assert pool.acquire(C) == 2, "A was let go of first, but is in use"


def test_the_number_of_active_adapters_is_limited() -> None:
    pool = Loads(4, 2).pool
    assert pool.acquire(A) == 1
    assert pool.acquire(B) == 2
    assert pool.acquire(C) is None
    pool.release(A)
    assert pool.acquire(C) == 3  # A stays in its slot
    assert pool.acquire(A) is None
    pool.release(B)
    assert pool.acquire(A) == 1


def test_a_slot_is_free_again_if_its_load_fails() -> None:
    loads = Loads(1, 1)
    pool = loads.pool
    loads.broken = frozenset("b")
    pool.acquire(A)
    pool.release(A)
    with pytest.raises(ModelRefused, match="does not fit"):
        pool.acquire(B)
    assert pool.acquire(A) == 1
    assert loads.loads == [(1, A), (1, B), (1, A)]  # B may have overwritten half of it


def test_an_adapter_has_its_slot_after_the_end_of_its_load() -> None:
    loads = Loads(2, 2, delayed=True)
    pool = loads.pool
    assert [pool.acquire(A), pool.acquire(A), pool.is_loading] == [None, None, True]
    loads.end(A)
    assert [pool.acquire(A), pool.is_loading] == [1, False]
    assert loads.loads == [(1, A)]


def test_an_adapter_that_is_being_loaded_keeps_its_slot() -> None:
    loads = Loads(2, 2, delayed=True)
    pool = loads.pool
    for adapter in (A, B, C):
        assert pool.acquire(adapter) is None
    assert loads.loads == [(1, A), (2, B)], "a load counts as an adapter in use"
    loads.end(B)
    assert pool.acquire(C) is None
    assert loads.loads[2:] == [(2, C)]
    loads.end(C)
    loads.end(A)
    assert [pool.acquire(A), pool.acquire(C)] == [1, 2]


def test_an_adapter_that_is_unloaded_during_its_load_is_forgotten_after_it() -> None:
    loads = Loads(1, 1, delayed=True)
    pool = loads.pool
    pool.acquire(A)
    pool.unregister("a")
    assert loads.forgotten == [], "the load still reads its weights"
    loads.end(A)
    assert loads.forgotten == [A]
    pool.acquire(B)
    loads.end(B)
    assert pool.acquire(B) == 1


def test_the_error_of_a_load_is_for_the_request_that_waits() -> None:
    loads = Loads(1, 1, delayed=True)
    pool = loads.pool
    loads.broken = frozenset("a")
    pool.begin(A)
    assert pool.acquire(A) is None
    loads.end(A)
    with pytest.raises(ModelRefused, match="does not fit"):
        pool.acquire(A)
    assert pool.acquire(A) is None, "the next request loads it once more"
    loads.end(A)
    pool.end(A)
    pool.begin(A)
    loads.broken = frozenset()
    assert pool.acquire(A) is None, "the request that waited has ended, and so has its error"
    loads.end(A)
    assert pool.acquire(A) == 1


def test_the_error_of_a_load_ends_with_its_cancelled_request() -> None:
    loads = Loads(1, 1, delayed=True)
    pool = loads.pool
    loads.broken = frozenset("a")
    pool.begin(A)
    assert pool.acquire(A) is None
    pool.end(A)
    loads.end(A)
    loads.broken = frozenset()
    pool.begin(A)
    assert pool.acquire(A) is None, "a later request loads the adapter again"
    loads.end(A)
    assert pool.acquire(A) == 1


def test_fitting_slots_count_the_slot_of_the_base_model() -> None:
    assert [fitting_slots(8, 10, free) for free in (0, 19, 20, 55, 90, 1000)] == [0, 0, 1, 4, 8, 8]
    assert fitting_slots(0, 10, 1000) == 0


def test_a_replaced_adapter_lives_until_its_last_request_ends() -> None:
    loads = Loads(2, 2)
    pool = loads.pool
    newer = Adapter("a", "/a", "2")
    pool.register(A)
    pool.begin(A)
    assert pool.acquire(A) == 1
    pool.register(newer)
    assert pool.acquire(newer) == 2
    pool.release(A)
    assert loads.forgotten == []
    pool.end(A)
    assert loads.forgotten == [A]
    assert pool.acquire(B) == 1, "its slot is free"


def test_an_unregistered_adapter_is_forgotten_at_once_if_no_request_uses_it() -> None:
    loads = Loads(1, 1)
    pool = loads.pool
    pool.register(A)
    assert pool.unregister("a") == A
    assert pool.unregister("a") is None
    assert loads.forgotten == [A]
    assert pool.registered == (B, C)


def test_a_waiting_request_keeps_its_adapter() -> None:
    loads = Loads(1, 1)
    pool = loads.pool
    pool.register(A)
    pool.begin(A)
    pool.unregister("a")
    assert loads.forgotten == []
    assert pool.acquire(A) == 1
    pool.release(A)
    pool.end(A)
    assert loads.forgotten == [A]


def test_a_pinned_adapter_keeps_its_slot() -> None:
    pool = Loads(2, 2).pool
    pool.register(A, pinned=True)
    for adapter in (A, B):
        pool.acquire(adapter)
        pool.release(adapter)
    assert pool.acquire(C) == 2, "A was used before B, but is pinned"
    pool.release(C)
    with pytest.raises(RequestRefused, match="of 2 adapter slots, 1 are pinned"):
        pool.register(B, pinned=True)
    pool.register(A)
    pool.acquire(C)
    assert pool.acquire(B) == 1, "A is not pinned any more"
