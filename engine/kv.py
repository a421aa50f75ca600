"""Cache memory: who holds which pages or which slot, and what of it can be used again. Integers only."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from .pages import PagePool
from .radix import Node, PrefixTree, common_prefix

if TYPE_CHECKING:
    from .request import Namespace
    from .runner import RunnerSpec


Copies = list[list[tuple[int, int]]]  # per group: pages (source, target)


@dataclass(slots=True, eq=False)
class Lease:
    """A sequence's hold on cache memory. `pages` may change under it, and `changes` with them."""

    namespace: Namespace
    cached: int  # first positions whose KV is there already
    capacity: int  # positions that fit; KVCache.grow raises it
    pages: tuple[array[int], ...] = ()  # per group: page of positions i * page_size …
    changes: int = 0  # of pages, so far
    state: int = -1  # slot of the recurrent state
    node: Node | None = None  # with pages: the deepest of them that stands in the prefix tree
    shared: int = 0  # with pages: how many, from the first, stand there
    tokens: list[int] = field(default_factory=list)  # with slots: the sequence's tokens, of which …
    known: int = 0  # … this many have their KV in the slot


class KVCache(Protocol):
    """What the scheduler needs of cache memory.

    Steps run in the order they were launched, so memory that is closed may be handed out at once, and what a
    launched step writes may be shared at once: nothing planned later can read too early or write too soon.
    """

    @property
    def total_tokens(self) -> int: ...

    @property
    def used_tokens(self) -> int:
        """Held by leases; what is kept for prefix hits only is not in it."""
        ...

    def open(self, namespace: Namespace, tokens: list[int]) -> Lease | None:
        """A lease for `tokens`, with as much of their KV as is there (never the last token's). None: none is free."""
        ...

    def grow(self, lease: Lease, length: int) -> bool:
        """Make room for `length` positions, all or nothing."""
        ...

    def share(self, lease: Lease, tokens: list[int], computed: int) -> None:
        """The KV of tokens[:computed], as far as they are known, is written or will be by a launched step.

        To be called after the step's batch was built: it may replace pages by equal ones.
        """
        ...

    def will_find_more(
        self, namespace: Namespace, waiting: list[int], lease: Lease, tokens: list[int], computed: int
    ) -> bool:
        """Once `lease` shares tokens[:computed], open(namespace, waiting) finds a page more than it would now."""
        ...

    def close(self, lease: Lease) -> None:
        """Give everything back; what was shared stays for others until its room is needed."""
        ...

    def forget(self) -> None:
        """Whatever no lease holds is not found again."""
        ...

    def take_copies(self) -> tuple[Copies, list[tuple[int, int]]]:
        """Copies (source, target) to do before the next step: pages per group, and states. All targets differ."""
        ...


def make_cache(spec: RunnerSpec) -> KVCache:
    """The cache that a runner of this kind needs."""
    if spec.groups:
        [group] = spec.groups
        return PagedKV(group.num_pages, group.page_size)
    return SlotKV(spec.num_states, spec.max_context)


class PagedKV:
    """Pages, shared by equal prefixes of the same namespace; the least recently used unused page is evicted first."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._num_pages, self._page_size = num_pages, page_size
        self._pool = PagePool(num_pages)
        self._tree = PrefixTree(page_size)
        self._copies: dict[int, int] = {}  # target -> source

    @property
    def total_tokens(self) -> int:
        return self._num_pages * self._page_size

    @property
    def used_tokens(self) -> int:
        return (self._num_pages - len(self._pool) - self._tree.num_unused) * self._page_size

    def open(self, namespace: Namespace, tokens: list[int]) -> Lease:
        root, end = self._tree.root(namespace), len(tokens) - 1
        path = self._tree.match(root, tokens, 0, end)
        for node in path:
            self._tree.use(node)
        deepest, cached = path[-1] if path else root, len(path) * self._page_size
        pages = array("i", [node.page for node in path])
        lease = Lease(namespace, cached, cached, (pages,), node=deepest, shared=len(path))
        self._copy_begun_page(lease, deepest, tuple(tokens[cached : min(cached + self._page_size, end)]))
        return lease

    def _copy_begun_page(self, lease: Lease, deepest: Node, tokens: tuple[int, ...]) -> None:
        """Copy on write: take over the first tokens of a page that goes on otherwise."""
        found = self._tree.closest(deepest, tokens)
        if found is None:
            return
        node, same = found
        if self.grow(lease, lease.cached + same):
            if node.page != lease.pages[0][-1]:  # equal when making room evicted that very page
                self._copies[lease.pages[0][-1]] = node.page
            lease.cached += same

    def grow(self, lease: Lease, length: int) -> bool:
        missing = -(-length // self._page_size) - len(lease.pages[0])
        if missing > len(self._pool) + self._tree.num_unused:
            return False
        for _ in range(missing):
            lease.pages[0].append(self._pool.take() if len(self._pool) else self._tree.evict())
        lease.changes += missing > 0
        lease.capacity = len(lease.pages[0]) * self._page_size
        return True

    def share(self, lease: Lease, tokens: list[int], computed: int) -> None:
        size = self._page_size
        full = min(computed, len(tokens)) // size
        for index in range(lease.shared, full):
            assert lease.node is not None
            key = tuple(tokens[index * size : (index + 1) * size])
            equal = lease.node.children.get(key)
            if equal is None:
                lease.node = self._tree.insert(lease.node, key, lease.pages[0][index])
            else:
                self._tree.use(equal)
                self._give_back(lease.pages[0][index])
                lease.pages[0][index] = equal.page
                lease.changes += 1
                lease.node = equal
        lease.shared = max(lease.shared, full)

    def will_find_more(
        self, namespace: Namespace, waiting: list[int], lease: Lease, tokens: list[int], computed: int
    ) -> bool:
        end = (lease.shared + 1) * self._page_size
        return (
            namespace == lease.namespace
            and end <= min(computed, len(tokens), len(waiting) - 1)
            and waiting[:end] == tokens[:end]
        )

    def close(self, lease: Lease) -> None:
        assert lease.node is not None
        self._tree.release(lease.node)
        for page in lease.pages[0][lease.shared :]:
            self._give_back(page)

    def forget(self) -> None:
        while self._tree.num_unused:
            self._pool.give_back(self._tree.evict())

    def _give_back(self, page: int) -> None:
        self._copies.pop(page, None)
        self._pool.give_back(page)

    def take_copies(self) -> tuple[Copies, list[tuple[int, int]]]:
        copies = [(source, target) for target, source in self._copies.items()]
        self._copies.clear()
        return [copies], []

    def check(self, leases: list[Lease]) -> None:
        """Assert what must always hold when `leases` are the open ones."""
        self._tree.check()
        nodes = list(self._tree.nodes())
        own = [page for lease in leases for page in lease.pages[0][lease.shared :]]
        everywhere = [*self._pool.free(), *own, *(node.page for node in nodes)]
        assert sorted(everywhere) == list(range(1, self._num_pages + 1)), "every page has exactly one place"
        assert set(self._copies) <= set(own)
        users = dict.fromkeys(nodes, 0)
        for lease in leases:
            node, depth = lease.node, 0
            while node is not None and node.parent is not None:
                users[node] += 1
                depth += 1
                assert node.page == lease.pages[0][lease.shared - depth]
                node = node.parent
            assert node is self._tree.root(lease.namespace)
            assert depth == lease.shared
        assert all(node.users == count for node, count in users.items())


class SlotKV:
    """A few caches, each long enough for one whole sequence; a free one keeps its tokens for a later prompt."""

    def __init__(self, num_slots: int, max_context: int) -> None:
        self._max_context = max_context
        self._last: list[tuple[Namespace, list[int]]] = [(None, []) for _ in range(num_slots)]
        self._free = OrderedDict.fromkeys(range(num_slots))  # least recently used first
        self._open: dict[int, Lease] = {}

    @property
    def total_tokens(self) -> int:
        return len(self._last) * self._max_context

    @property
    def used_tokens(self) -> int:
        return sum(lease.known for lease in self._open.values())

    def open(self, namespace: Namespace, tokens: list[int]) -> Lease | None:
        best, cached = -1, 0
        for slot in self._free:
            kept_for, kept = self._last[slot]
            same = min(common_prefix(kept, tokens), len(tokens) - 1) if kept_for == namespace else 0
            if best < 0 or same > cached:
                best, cached = slot, same
        if best < 0:
            return None
        del self._free[best]
        lease = Lease(namespace, cached, self._max_context, state=best, tokens=tokens, known=cached)
        self._open[best] = lease
        return lease

    def grow(self, lease: Lease, length: int) -> bool:
        return length <= lease.capacity

    def share(self, lease: Lease, tokens: list[int], computed: int) -> None:
        lease.tokens, lease.known = tokens, min(computed, len(tokens))

    def will_find_more(
        self, namespace: Namespace, waiting: list[int], lease: Lease, tokens: list[int], computed: int
    ) -> bool:
        return False  # a slot has one sequence at a time

    def close(self, lease: Lease) -> None:
        self._last[lease.state] = lease.namespace, lease.tokens[: lease.known]
        del self._open[lease.state]
        self._free[lease.state] = None

    def forget(self) -> None:
        for slot in self._free:
            self._last[slot] = None, []

    def take_copies(self) -> tuple[Copies, list[tuple[int, int]]]:
        return [], []
