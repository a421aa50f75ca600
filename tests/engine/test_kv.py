"""Cache memory in small, hand-made cases; test_prefix_cache.py has the random ones."""

from __future__ import annotations

import pytest

from localllm.engine.kv import Lease, PagedKV, SlotKV, make_cache
from localllm.engine.lora import Adapter
from localllm.engine.radix import common_prefix
from localllm.engine.runner import CacheGroup, RunnerSpec

A1, A2 = Adapter("a", "/a", "1"), Adapter("a", "/a", "2")


def page_copies(kv: PagedKV) -> list[tuple[int, int]]:
    [copies], _ = kv.take_copies()
    return copies


def computed(kv: PagedKV | SlotKV, tokens: list[int], namespace: Adapter | None = None) -> Lease:
    """A lease for tokens that were all computed and shared."""
    lease = kv.open(namespace, tokens)
    assert lease is not None
    assert kv.grow(lease, len(tokens))
    kv.take_copies()
    kv.share(lease, tokens, len(tokens))
    return lease


def test_the_last_token_is_always_computed() -> None:
    kv = PagedKV(num_pages=8, page_size=4)
    kv.close(computed(kv, list(range(8))))
    lease = kv.open(None, list(range(8)))
    assert lease.cached == 7  # a page shared, and three tokens of the second one copied
    assert lease.shared == 1
    assert len(lease.pages[0]) == 2
    [(source, target)] = page_copies(kv)
    assert target == lease.pages[0][1]
    assert source != target
    kv.check([lease])


def test_a_begun_page_is_copied_from_the_closest_one() -> None:
    kv = PagedKV(num_pages=8, page_size=4)
    pages = {}
    for last in ([1, 2, 3, 4], [1, 2, 9, 9], [5, 5, 5, 5]):
        lease = computed(kv, [0, 0, 0, 0, *last])
        pages[tuple(last)] = lease.pages[0][1]
        kv.close(lease)
    lease = kv.open(None, [0, 0, 0, 0, 1, 2, 3, 7, 7])
    assert lease.cached == 7
    assert page_copies(kv) == [(pages[1, 2, 3, 4], lease.pages[0][1])]


def test_no_room_for_a_copy_means_no_copy() -> None:
    kv = PagedKV(num_pages=2, page_size=4)
    held = computed(kv, [1] * 8)
    lease = kv.open(None, [1, 1, 1, 1, 1, 1, 2])
    assert (lease.cached, lease.shared) == (4, 1)
    assert page_copies(kv) == []
    kv.check([held, lease])


def test_the_page_to_copy_may_be_the_one_that_makes_room() -> None:
    kv = PagedKV(num_pages=2, page_size=4)
    kv.close(computed(kv, [1] * 8))
    lease = kv.open(None, [1, 1, 1, 1, 1, 1, 2])
    assert lease.cached == 6
    assert page_copies(kv) == []  # it is that page now
    kv.check([lease])


def test_a_copy_is_dropped_with_its_target() -> None:
    kv = PagedKV(num_pages=4, page_size=4)
    kv.close(computed(kv, [1] * 4))
    lease = kv.open(None, [1, 1, 2])
    kv.close(lease)
    assert page_copies(kv) == []
    first, second = kv.open(None, [1, 1, 2]), kv.open(None, [1, 1, 1, 2])
    kv.close(first)
    third = kv.open(None, [1, 2])  # gets the page that was to be copied into
    assert third.pages[0] == first.pages[0]
    assert sorted(target for _, target in page_copies(kv)) == sorted([*second.pages[0], *third.pages[0]])
    kv.check([second, third])


def test_equal_pages_become_one_and_a_later_page_stays() -> None:
    kv = PagedKV(num_pages=8, page_size=2)
    tokens = [1, 2, 3, 4, 5]
    first, second = kv.open(None, tokens), kv.open(None, tokens)
    for lease in (first, second):
        assert kv.grow(lease, 5)
    own = list(second.pages[0])
    kv.share(first, tokens, 5)
    kv.share(second, tokens, 5)
    assert second.pages[0][:2] == first.pages[0][:2]
    assert second.pages[0][2] == own[2]
    assert kv.used_tokens == 4 * 2
    kv.check([first, second])
    kv.close(first)
    assert kv.used_tokens == 3 * 2
    kv.check([second])


def test_unknown_tokens_never_enter_the_tree() -> None:
    kv = PagedKV(num_pages=8, page_size=2)
    lease = kv.open(None, [1, 2, 3])
    assert kv.grow(lease, 4)
    kv.share(lease, [1, 2, 3], 4)  # position 3 is computed from a token still on the device
    assert lease.shared == 1


def test_another_version_of_an_adapter_reuses_nothing() -> None:
    kv = PagedKV(num_pages=8, page_size=2)
    kv.close(computed(kv, [1, 2, 3], A1))
    assert kv.open(A2, [1, 2, 3]).cached == 0
    assert kv.open(None, [1, 2, 3]).cached == 0
    assert kv.open(Adapter("a", "/a", "1"), [1, 2, 3]).cached == 2  # a value: equal is the same


def test_the_least_recently_used_leaf_goes_first() -> None:
    kv = PagedKV(num_pages=4, page_size=1)
    kv.close(computed(kv, [1, 2]))
    kv.close(computed(kv, [1, 3]))
    kv.close(computed(kv, [1, 2, 4]))  # uses 2 again
    lease = kv.open(None, [9])
    assert kv.grow(lease, 1)
    assert kv.open(None, [1, 3, 0]).cached == 1
    assert kv.open(None, [1, 2, 4, 0]).cached == 3


def test_growing_is_all_or_nothing() -> None:
    kv = PagedKV(num_pages=4, page_size=2)
    lease = kv.open(None, [1])
    assert not kv.grow(lease, 9)
    assert lease.capacity == 0
    assert kv.used_tokens == 0
    assert kv.grow(lease, 8)
    assert (lease.capacity, kv.used_tokens, kv.total_tokens) == (8, 8, 8)
    assert kv.grow(lease, 3)  # smaller is no harm
    assert 0 not in lease.pages[0]


def test_slots_prefer_the_longest_common_prefix() -> None:
    kv = SlotKV(num_slots=3, max_context=16)
    for lease in [computed(kv, tokens) for tokens in ([1, 2, 3, 4], [1, 2, 9])]:
        kv.close(lease)
    first = kv.open(None, [1, 2, 3, 5])
    assert first is not None
    assert (first.state, first.cached) == (0, 3)
    second = kv.open(None, [1, 2, 3, 5])  # the best one is taken
    assert second is not None
    assert (second.state, second.cached) == (1, 2)
    third = kv.open(None, [1, 2, 3, 5])
    assert third is not None
    assert (third.state, third.cached) == (2, 0)
    assert kv.open(None, [1]) is None
    assert kv.used_tokens == 5


def test_slots_keep_only_what_was_computed_and_known() -> None:
    kv = SlotKV(num_slots=1, max_context=8)
    tokens = [1, 2, 3, 4]
    lease = kv.open(None, tokens)
    assert lease is not None
    kv.share(lease, tokens, 2)
    kv.close(lease)
    again = kv.open(None, tokens)
    assert again is not None
    assert again.cached == 2
    kv.share(again, tokens, 6)  # two tokens are still on the device
    kv.close(again)
    last = kv.open(None, [1, 2, 3, 4])
    assert last is not None
    assert last.cached == 3  # never the last token
    assert kv.grow(last, 8)
    assert not kv.grow(last, 9)
    assert kv.take_copies() == ([], [])


def test_slots_of_another_adapter_reuse_nothing_and_the_oldest_is_taken() -> None:
    kv = SlotKV(num_slots=2, max_context=8)
    kv.close(computed(kv, [1, 2, 3], A1))  # slot 0
    kv.close(computed(kv, [5, 6, 7], A1))  # slot 1
    lease = kv.open(A2, [5, 6, 7])
    assert lease is not None
    assert (lease.state, lease.cached) == (0, 0)
    assert kv.total_tokens == 16


def test_a_lease_that_never_ran_keeps_its_slot_reusable() -> None:
    kv = SlotKV(num_slots=1, max_context=8)
    kv.close(computed(kv, [1, 2, 3]))
    lease = kv.open(None, [1, 2, 9])
    assert lease is not None
    kv.close(lease)
    again = kv.open(None, [1, 2, 3])
    assert again is not None
    assert again.cached == 2


@pytest.mark.parametrize(("groups", "total"), [((CacheGroup(4, 6),), 24), ((), 64)])
def test_the_spec_chooses_the_cache(groups: tuple[CacheGroup, ...], total: int) -> None:
    spec = RunnerSpec(10, 8, 4, 32, groups, num_states=2)
    assert make_cache(spec).total_tokens == spec.cache_tokens == total


@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17])
def test_common_prefix(length: int) -> None:
    for same in range(length + 1):
        a = list(range(length))
        b = a[:same] + [-1] * (length - same)
        assert common_prefix(a, b) == common_prefix(b, a) == same
        assert common_prefix(a, a[:same]) == same
