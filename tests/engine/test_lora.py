from __future__ import annotations

import pytest

from localllm.engine.errors import ModelRefused, RequestRefused
from localllm.engine.lora import Adapter, AdapterPool

A, B, C = (Adapter(name, f"/{name}", "1") for name in "abc")


class Loads(list[tuple[int, Adapter]]):
    """What was loaded where; refuses adapters named in `broken`."""

    broken: frozenset[str] = frozenset()

    def __call__(self, slot: int, adapter: Adapter) -> None:
        if adapter.name in self.broken:
            raise ModelRefused(f"{adapter.path} does not fit")
        self.append((slot, adapter))


def test_a_new_version_replaces_an_adapter_of_the_same_name() -> None:
    pool = AdapterPool(2, 2, Loads())
    pool.register(A)
    assert pool.find("a") == A
    assert pool.find("b") is None
    newer = Adapter("a", "/a", "2")
    pool.register(newer)
    assert pool.find("a") == newer


def test_slots_count_from_one_and_are_loaded_once() -> None:
    loads = Loads()
    pool = AdapterPool(2, 2, loads)
    assert [pool.acquire(A), pool.acquire(B), pool.acquire(A)] == [1, 2, 1]
    assert loads == [(1, A), (2, B)]


def test_the_least_recently_used_free_adapter_is_evicted() -> None:
    loads = Loads()
    pool = AdapterPool(2, 2, loads)
    for adapter in (A, B, A):
        pool.acquire(adapter)
    assert pool.acquire(C) is None
    pool.release(A)
    assert pool.acquire(C) is None  # A has one more user
    pool.release(B)
    pool.release(A)
    assert pool.acquire(C) == 2  # B was let go of before A
    assert pool.acquire(A) == 1
    assert loads == [(1, A), (2, B), (2, C)]


def test_one_that_is_used_again_is_not_evicted() -> None:
    pool = AdapterPool(2, 2, Loads())
    for adapter in (A, B):
        pool.acquire(adapter)
        pool.release(adapter)
    assert pool.acquire(A) == 1
    assert pool.acquire(C) == 2, "A was let go of first, but is in use"


def test_the_number_of_active_adapters_is_limited() -> None:
    pool = AdapterPool(4, 2, Loads())
    assert pool.acquire(A) == 1
    assert pool.acquire(B) == 2
    assert pool.acquire(C) is None
    pool.release(A)
    assert pool.acquire(C) == 3  # A stays in its slot
    assert pool.acquire(A) is None
    pool.release(B)
    assert pool.acquire(A) == 1


def test_a_slot_is_free_again_if_its_load_fails() -> None:
    loads = Loads()
    pool = AdapterPool(1, 1, loads)
    loads.broken = frozenset("b")
    pool.acquire(A)
    pool.release(A)
    with pytest.raises(ModelRefused, match="does not fit"):
        pool.acquire(B)
    assert pool.acquire(A) == 1
    assert loads == [(1, A), (1, A)]  # B may have overwritten half of it


def test_a_replaced_adapter_lives_until_its_last_request_ends() -> None:
    forgotten: list[Adapter] = []
    pool = AdapterPool(2, 2, Loads(), forgotten.append)
    newer = Adapter("a", "/a", "2")
    pool.register(A)
    pool.begin(A)
    assert pool.acquire(A) == 1
    pool.register(newer)
    assert pool.acquire(newer) == 2
    pool.release(A)
    assert forgotten == []
    pool.end(A)
    assert forgotten == [A]
    assert pool.acquire(B) == 1, "its slot is free"


def test_an_unregistered_adapter_is_forgotten_at_once_if_no_request_uses_it() -> None:
    forgotten: list[Adapter] = []
    pool = AdapterPool(1, 1, Loads(), forgotten.append)
    pool.register(A)
    assert pool.unregister("a") == A
    assert pool.unregister("a") is None
    assert forgotten == [A]
    assert pool.registered == ()


def test_a_waiting_request_keeps_its_adapter() -> None:
    forgotten: list[Adapter] = []
    pool = AdapterPool(1, 1, Loads(), forgotten.append)
    pool.register(A)
    pool.begin(A)
    pool.unregister("a")
    assert forgotten == []
    assert pool.acquire(A) == 1
    pool.release(A)
    pool.end(A)
    assert forgotten == [A]


def test_a_pinned_adapter_keeps_its_slot() -> None:
    pool = AdapterPool(2, 2, Loads())
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
