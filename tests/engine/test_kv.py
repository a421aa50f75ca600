"""Cache memory in small, hand-made cases; test_prefix_cache.py has the random ones."""

from __future__ import annotations

import pytest

from localllm.engine.kv import KVCache, Lease
from localllm.engine.lora import Adapter
from localllm.engine.radix import common_prefix
from localllm.engine.runner import CacheGroup, RunnerSpec

from .cache_check import check_cache

A1, A2 = Adapter("a", "/a", "1"), Adapter("a", "/a", "2")


def paged(num_pages: int, page_size: int) -> KVCache:
    """A cache with one group."""
    return KVCache(RunnerSpec(10, 8, 4, 32, (CacheGroup(page_size, num_pages),)))


def page_copies(kv: KVCache) -> list[tuple[int, int]]:
    [copies], _ = kv.take_copies()
    return copies


def computed(kv: KVCache, tokens: list[int], namespace: Adapter | None = None) -> Lease:
    """A lease for tokens that were all computed and shared."""
    lease = kv.open(namespace, tokens)
    assert lease is not None
    for end in [*range(8, len(tokens), 8), len(tokens)]:  # a step has 8 tokens
        assert kv.grow(lease, end)
        kv.take_copies()
        kv.share(lease, tokens, end)
    return lease


def test_the_last_token_is_always_computed() -> None:
    kv = paged(8, 4)
    kv.close(computed(kv, list(range(8))))
    lease = kv.open(None, list(range(8)))
    assert lease.cached == 7  # a page shared, and three tokens of the second one copied
    assert lease.path == lease.path[:1]
    assert len(lease.pages[0]) == 2
    [(source, target)] = page_copies(kv)
    assert target == lease.pages[0][1]
    assert source != target
    check_cache(kv, [lease])


def test_a_begun_page_is_copied_from_the_closest_one() -> None:
    kv = paged(8, 4)
    pages = {}
    for last in ([1, 2, 3, 4], [1, 2, 9, 9], [5, 5, 5, 5]):
        lease = computed(kv, [0, 0, 0, 0, *last])
        pages[tuple(last)] = lease.pages[0][1]
        kv.close(lease)
    lease = kv.open(None, [0, 0, 0, 0, 1, 2, 3, 7, 7])
    assert lease.cached == 7
    assert page_copies(kv) == [(pages[1, 2, 3, 4], lease.pages[0][1])]


def test_no_room_for_a_copy_means_no_copy() -> None:
    kv = paged(2, 4)
    held = computed(kv, [1] * 8)
    lease = kv.open(None, [1, 1, 1, 1, 1, 1, 2])
    assert (lease.cached, len(lease.path)) == (4, 1)
    assert page_copies(kv) == []
    check_cache(kv, [held, lease])


def test_the_page_to_copy_may_be_the_one_that_makes_room() -> None:
    kv = paged(2, 4)
    kv.close(computed(kv, [1] * 8))
    lease = kv.open(None, [1, 1, 1, 1, 1, 1, 2])
    assert lease.cached == 6
    assert page_copies(kv) == []  # the lease takes over the page, so nothing is copied
    check_cache(kv, [lease])


def test_a_copy_is_dropped_with_its_target() -> None:
    kv = paged(4, 4)
    kv.close(computed(kv, [1] * 4))
    lease = kv.open(None, [1, 1, 2])
    kv.close(lease)
    assert page_copies(kv) == []
    first, second = kv.open(None, [1, 1, 2]), kv.open(None, [1, 1, 1, 2])
    kv.close(first)
    third = kv.open(None, [1, 2])  # gets the page that was the target of the copy
    assert third.pages[0] == first.pages[0]
    assert sorted(target for _, target in page_copies(kv)) == sorted([*second.pages[0], *third.pages[0]])
    check_cache(kv, [second, third])


def test_equal_pages_become_one_and_a_later_page_stays() -> None:
    kv = paged(8, 2)
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
    check_cache(kv, [first, second])
    kv.close(first)
    assert kv.used_tokens == 3 * 2
    check_cache(kv, [second])


def test_unknown_tokens_never_enter_the_tree() -> None:
    kv = paged(8, 2)
    lease = kv.open(None, [1, 2, 3])
    assert kv.grow(lease, 4)
    kv.share(lease, [1, 2, 3], 4)  # position 3 is computed from a token still on the device
    assert lease.path == lease.path[:1]


def test_another_version_of_an_adapter_reuses_nothing() -> None:
    kv = paged(8, 2)
    kv.close(computed(kv, [1, 2, 3], A1))
    assert kv.open(A2, [1, 2, 3]).cached == 0
    assert kv.open(None, [1, 2, 3]).cached == 0
    assert kv.open(Adapter("a", "/a", "1"), [1, 2, 3]).cached == 2  # adapters are compared by value


def test_the_least_recently_used_leaf_goes_first() -> None:
    kv = paged(4, 1)
    kv.close(computed(kv, [1, 2]))
    kv.close(computed(kv, [1, 3]))
    kv.close(computed(kv, [1, 2, 4]))  # uses 2 again
    lease = kv.open(None, [9])
    assert kv.grow(lease, 1)
    assert kv.open(None, [1, 3, 0]).cached == 1
    assert kv.open(None, [1, 2, 4, 0]).cached == 3


def test_growing_is_all_or_nothing() -> None:
    kv = paged(4, 2)
    lease = kv.open(None, [1])
    assert not kv.grow(lease, 9)
    assert lease.capacity == 0
    assert kv.used_tokens == 0
    assert kv.grow(lease, 8)
    assert (lease.capacity, kv.used_tokens, kv.total_tokens) == (8, 8, 8)
    assert kv.grow(lease, 3)  # smaller is no harm
    assert 0 not in lease.pages[0]


def states(num_states: int, num_snapshots: int, interval: int = 4) -> KVCache:
    """A cache without pages."""
    spec = RunnerSpec(10, 8, 4, 32, num_states=num_states, num_snapshots=num_snapshots, snapshot_interval=interval)
    return KVCache(spec)


def state_copies(kv: KVCache) -> list[tuple[int, int]]:
    _, copies = kv.take_copies()
    return copies


def test_a_state_is_copied_at_a_border_and_restored_by_a_hit() -> None:
    kv = states(2, 2)
    lease = kv.open(None, list(range(9)))
    assert lease is not None
    assert kv.grow(lease, 9)
    assert (kv.step_end(0, 9, True), kv.step_end(8, 9, True)) == (8, 9)
    assert (kv.step_end(0, 8, True), kv.step_end(0, 8, False)) == (4, 8)
    kv.share(lease, list(range(9)), 8)
    [(source, snapshot)] = state_copies(kv)
    assert source == lease.state
    assert snapshot in (2, 3)
    kv.share(lease, list(range(9)), 9)
    again = kv.open(None, list(range(10)))
    assert again is not None
    assert again.cached == 8
    assert state_copies(kv) == [(snapshot, again.state)]
    assert kv.open(None, [1]) is None, "both states are in use"
    check_cache(kv, [lease, again])


def test_a_hit_on_a_snapshot_that_is_still_to_be_copied_reads_its_source() -> None:
    kv = states(2, 1)
    first = computed(kv, list(range(4)))
    kv.share(first, [0, 1, 2, 3, 4], 5)
    kv.close(first)
    again = kv.open(None, list(range(5)))
    assert again is not None
    assert again.cached == 4
    assert again.state == first.state, "handed out again at once"
    assert sorted(state_copies(kv)) == [(first.state, again.state), (first.state, 2)]


def test_a_hit_ends_at_the_last_snapshot() -> None:
    kv = states(2, 8)
    tokens = list(range(14))
    lease = kv.open(None, tokens)
    assert lease is not None
    for end in (4, 12, 14):
        kv.share(lease, tokens, end)
    again = kv.open(None, tokens[:12])
    assert again is not None
    assert again.cached == 4  # none after 8, and 12 is too long
    check_cache(kv, [lease, again])


def test_a_snapshot_of_an_unknown_token_waits_for_it() -> None:
    kv = states(2, 2)
    tokens = [1, 2, 3]
    lease = kv.open(None, tokens)
    assert lease is not None
    kv.share(lease, tokens, 4)  # the fourth token is still on the device
    assert kv.open(None, [1, 2, 3, 4, 5]).cached == 0  # type: ignore[union-attr]
    tokens.append(4)
    kv.share(lease, tokens, 5)
    kv.close(lease)
    assert kv.open(None, [1, 2, 3, 4, 5]).cached == 4  # type: ignore[union-attr]


def test_a_snapshot_without_its_block_is_dropped_with_the_lease() -> None:
    kv = states(1, 1)
    lease = kv.open(None, [1, 2, 3])
    assert lease is not None
    kv.share(lease, [1, 2, 3], 4)
    kv.close(lease)
    assert kv.take_copies() == ([], [])
    check_cache(kv, [])


def test_the_least_recently_used_snapshot_goes_first() -> None:
    kv = states(1, 2)
    for name in (10, 20):
        kv.close(computed(kv, [name] * 4))
    lease = kv.open(None, [10] * 5)
    assert lease is not None
    kv.close(lease)
    kv.close(computed(kv, [30] * 4))
    cached = {}
    for name in (10, 20, 30):
        lease = kv.open(None, [name] * 5)
        assert lease is not None
        cached[name] = lease.cached
        kv.close(lease)
    assert cached == {10: 4, 20: 0, 30: 4}
    check_cache(kv, [])
    kv.evict_all()
    assert not list(kv._tree.nodes())


def windowed(window: int, num_pages: int = 40, full: int = 40) -> KVCache:
    """Two groups with pages of 2 and 4 tokens; the second has a window."""
    return KVCache(RunnerSpec(10, 8, 4, 64, (CacheGroup(2, full), CacheGroup(4, num_pages, window))))


def test_pages_behind_the_window_are_released_and_stay_for_hits() -> None:
    kv = windowed(5)
    tokens = list(range(17))
    lease = computed(kv, tokens[:12])
    assert kv.grow(lease, 17)
    changes = lease.changes
    kv.share(lease, tokens, 17)
    assert lease.changes > changes, "the page table is built again"
    assert [page > 0 for page in lease.pages[1]] == [
        False,
        False,
        False,
        True,
        True,
    ]  # the pages of positions 13…16 and of their windows
    assert all(lease.pages[0])
    check_cache(kv, [lease])
    again = kv.open(None, tokens)
    assert again is not None
    assert again.cached == 16
    assert [page > 0 for page in again.pages[1]] == [False, False, False, True]
    check_cache(kv, [lease, again])


def test_nothing_that_no_lease_reads_survives_forgetting() -> None:
    kv = windowed(5)
    lease = computed(kv, list(range(17)))
    kv.evict_all()
    assert not kv._windows[0].unread
    check_cache(kv, [lease])
    assert kv.open(None, list(range(9))).cached == 0  # type: ignore[union-attr]
    kv = states(2, 2)
    lease = computed(kv, list(range(8)))
    kv.evict_all()
    check_cache(kv, [lease])
    assert kv.take_copies() == ([], [])
    assert kv.open(None, list(range(9))).cached == 0  # type: ignore[union-attr]


def test_a_hit_ends_where_a_window_lacks_pages() -> None:
    kv = windowed(5, num_pages=16)
    tokens = list(range(17))
    kv.close(computed(kv, tokens))
    blocker = kv.open(None, [9])
    assert blocker is not None
    blocker.next_share = 60  # the blocks of this lease are not added to the tree before position 60
    assert kv.grow(blocker, 56)  # takes the pages of the first two blocks
    assert kv.open(None, tokens).cached == 16  # type: ignore[union-attr]
    assert kv.open(None, tokens[:9]).cached == 0  # type: ignore[union-attr]


def test_a_block_that_lacks_pages_is_filled_in_by_the_next_that_computes_it() -> None:
    kv = windowed(5, num_pages=16)
    tokens = list(range(9))
    kv.close(computed(kv, tokens))
    while kv._windows[0].unread:
        kv._tree.prune(kv._windows[0].evict())
    lease = computed(kv, tokens)
    assert lease.cached == 0
    check_cache(kv, [lease])
    kv.close(lease)
    assert kv.open(None, tokens).cached == 8  # type: ignore[union-attr]


def test_a_copy_within_a_block_has_the_pages_of_every_group() -> None:
    kv = KVCache(RunnerSpec(10, 8, 4, 64, (CacheGroup(2, 40), CacheGroup(4, 40))))
    first = computed(kv, [1, 2, 3, 4, 5, 6, 7, 8])
    lease = kv.open(None, [1, 2, 3, 4, 5, 6, 7, 9, 9])
    assert lease is not None
    assert lease.cached == 7
    copies, _ = kv.take_copies()
    assert copies[0] == list(zip(first.pages[0][2:4], lease.pages[0][2:4], strict=True))
    assert copies[1] == [(first.pages[1][1], lease.pages[1][1])]
    check_cache(kv, [first, lease])


def test_a_window_that_fits_no_sequence_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="window of 5 needs pages for 25 positions, not 24"):
        windowed(5, num_pages=6)


@pytest.mark.parametrize(("groups", "total"), [((CacheGroup(4, 6),), 24), ((), 64)])
def test_the_spec_chooses_the_cache(groups: tuple[CacheGroup, ...], total: int) -> None:
    spec = RunnerSpec(10, 8, 4, 32, groups, num_states=2)
    assert KVCache(spec).total_tokens == spec.cache_tokens == total


@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17])
def test_common_prefix(length: int) -> None:
    for same in range(length + 1):
        a = list(range(length))
        b = a[:same] + [-1] * (length - same)
        assert common_prefix(a, b) == common_prefix(b, a) == same
        assert common_prefix(a, a[:same]) == same


def limited(num_pages: int, page_size: int, paths: int) -> KVCache:
    """A cache with one group whose runner has 1 row and limits the number of paths."""
    return KVCache(RunnerSpec(10, 8, 1, 32, (CacheGroup(page_size, num_pages),), max_paths=paths))


def test_freed_pages_are_listed_once_and_all_at_first() -> None:
    kv = limited(4, 2, 2)
    assert sorted(kv.take_freed()[0]) == [(1, 0), (2, 0), (3, 0), (4, 0)]
    lease = computed(kv, [1, 2, 3, 4, 5])
    assert kv.take_freed() == [[]]
    kv.close(lease)  # the pages of four tokens stay in the tree
    assert kv.take_freed() == [[(lease.pages[0][2], 0)]]
    assert kv.take_freed() == [[]]
    kv.evict_all()
    assert sorted(kv.take_freed()[0]) == sorted([(page, 0) for page in lease.pages[0][:2]])


def test_a_replaced_page_is_listed_with_its_replacement() -> None:
    kv = limited(8, 2, 8)
    leases = [kv.open(None, [1, 2, 3]) for _ in range(2)]
    for lease in leases:
        assert kv.grow(lease, 3)
    pages = [lease.pages[0][0] for lease in leases]
    kv.take_freed()
    for lease in leases:
        kv.share(lease, [1, 2, 3], 3)
    assert kv.take_freed() == [[(pages[1], pages[0])]]


def test_a_page_that_a_lease_gets_back_with_its_kv_is_not_listed() -> None:
    kv = limited(2, 4, 4)
    kv.close(computed(kv, [1] * 8))
    kv.take_freed()
    lease = kv.open(None, [1, 1, 1, 1, 1, 1, 2])
    assert lease.cached == 6
    assert kv.take_freed() == [[]]


def test_a_cache_without_a_limit_lists_no_pages() -> None:
    kv = paged(4, 2)
    kv.close(computed(kv, [1, 2, 3]))
    assert kv.take_freed() == [[]]


def test_the_path_that_was_used_longest_ago_makes_room_for_a_new_one() -> None:
    kv = limited(99, 1, 4)
    for first in (1, 2, 3, 4, 5):
        kv.close(computed(kv, [first, 7, 8]))
    check_cache(kv, [])
    cached = []
    for first in (2, 3, 4, 5, 1):
        lease = kv.open(None, [first, 7, 8, 0])
        cached.append(lease.cached)
        kv.close(lease)
    assert cached == [3, 3, 3, 3, 0]


def test_fewer_paths_than_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="4 rows"):
        KVCache(RunnerSpec(10, 8, 4, 32, (CacheGroup(4, 4),), max_paths=3))
