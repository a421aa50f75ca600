"""Cache memory: the pages and states of each sequence, and the prefix hits on those of others. Integers only.

A sequence has pages in every cache group and a slot for its recurrent state, as far as the runner has these. Full
blocks of tokens enter the prefix tree; a block is a multiple of every group's page size. A prefix hit ends

    after a block whose pages are present in all groups, as far back as each group's window reaches,
    and which has a snapshot of the state, where the runner has states;
    or, without states, within the block after it, which is copied (copy on write).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

from .groups import Group
from .radix import Node, PrefixTree

if TYPE_CHECKING:
    from .request import Namespace
    from .runner import CacheGroup, RunnerSpec

BLOCK_WITHOUT_PAGES = 16
Copies = list[list[tuple[int, int]]]  # per group: pages (source, target)


@dataclass(slots=True, eq=False)
class Lease:
    """The cache memory of one sequence. `pages` may change between steps, and `changes` with them."""

    namespace: Namespace
    cached: int  # first positions that the cache has already
    capacity: int  # positions that fit; KVCache.grow raises it
    pages: tuple[array[int], ...]  # per group: page of positions i * page_size …; 0 behind the window
    root: Node
    path: list[Node]  # the blocks in the prefix tree, from the first
    next_share: int  # positions after which KVCache.share has something to do
    passed: list[int]  # per group: blocks behind the window
    changes: int = 0  # number of changes to `pages`
    state: int = -1  # slot of the recurrent state
    snapshot: int = -1  # of the state at `snapshot_at`, until its block is in the tree
    snapshot_at: int = 0


class KVCache:
    """Cache memory of one runner. Not thread-safe.

    Steps run in the order of their launch. So memory may be handed out again at once when its lease is closed, and
    positions that a launched step writes may be shared at once.
    """

    def __init__(self, spec: RunnerSpec) -> None:
        """Raises ValueError for a group with a window that is too small for one sequence."""
        self._max_context = spec.max_context
        self._max_tokens = spec.max_tokens
        self._num_states = spec.num_states
        interval = spec.snapshot_interval if spec.num_states else 0
        sizes = [group.page_size for group in spec.groups]
        self._block = lcm(*sizes, interval) if interval else lcm(*sizes) if sizes else BLOCK_WITHOUT_PAGES
        self.snapshot_interval = self._block if spec.num_snapshots else 0  # 0: no snapshots
        self._groups = [Group(index, group, self._block) for index, group in enumerate(spec.groups)]
        self._windows = [group for group in self._groups if group.window]
        self._first_readers = [1 if group.window else 0 for group in self._groups]
        for group in spec.groups:
            self._check_window(group)
        self._tree = PrefixTree(self._block)
        self._page_copies: list[dict[int, int]] = [{} for _ in self._groups]  # target -> source
        self._state_copies: dict[int, int] = {}  # target -> source
        self._free_states = list(range(spec.num_states - 1, -1, -1))
        self._free_snapshots = list(range(spec.num_states + spec.num_snapshots - 1, spec.num_states - 1, -1))
        self._snapshots: OrderedDict[Node, None] = OrderedDict()  # nodes with one, least recently used first

    def _check_window(self, group: CacheGroup) -> None:
        needed = min(self._max_context, group.window + self._max_tokens + 3 * self._block)
        if group.window and group.tokens < needed:
            raise ValueError(f"a window of {group.window} needs pages for {needed} positions, not {group.tokens}")

    @property
    def total_tokens(self) -> int:
        """Positions that fit into the first group without a window, or into all states."""
        whole = self._whole()
        return self._num_states * self._max_context if whole is None else whole.num_pages * whole.page_size

    @property
    def used_tokens(self) -> int:
        """The part of `total_tokens` that leases have. Memory that is only kept for prefix hits is not in it."""
        whole = self._whole()
        if whole is None:
            return (self._num_states - len(self._free_states)) * self._max_context
        return (whole.num_pages - self._available(whole)) * whole.page_size

    def _whole(self) -> Group | None:
        """The group that tells how full the cache is."""
        whole = [group for group in self._groups if not group.window]
        return next(iter(whole or self._groups), None)

    def open(self, namespace: Namespace, tokens: list[int]) -> Lease | None:
        """A lease for `tokens`, with as many of them cached as possible (never the last). None: no state is free."""
        if self._num_states and not self._free_states:
            return None
        root = self._tree.root(namespace)
        path = self._tree.match(root, tokens, 0, len(tokens) - 1)
        del path[self._usable(path) :]
        cached = len(path) * self._block
        for node in path:
            self._tree.use(node)
        passed = [group.passed(cached, self._block) for group in self._groups]
        pages = tuple([group.pages_of(path, passed[group.index]) for group in self._groups])
        lease = Lease(namespace, cached, cached, pages, root, path, cached + self._block, passed)
        for group in self._windows:
            for node in path[passed[group.index] :]:
                group.read(node)
        if self._num_states:
            self._restore(lease)
        else:
            end = min(cached + self._block, len(tokens) - 1)
            self._copy_begun_block(lease, tuple(tokens[cached:end]))
        if not self._groups:
            lease.capacity = self._max_context
        return lease

    def _usable(self, path: list[Node]) -> int:
        """Blocks of the longest hit on this path."""
        if not self._num_states and not self._windows:
            return len(path)
        for count in range(len(path), 0, -1):
            if (not self._num_states or path[count - 1].snapshot >= 0) and self._in_windows(path, count):
                return count
        return 0

    def _in_windows(self, path: list[Node], count: int) -> bool:
        """The pages that the windows read behind `count` blocks are present."""
        return all(
            node.pages[group.index]
            for group in self._windows
            for node in path[group.passed(count * self._block, self._block) : count]
        )

    def _restore(self, lease: Lease) -> None:
        """Give the lease a state slot, with the state of its prefix hit."""
        lease.state = self._free_states.pop()
        if lease.path:
            node = lease.path[-1]
            self._snapshots.move_to_end(node)
            # The snapshot itself may be a copy of the next step.
            self._state_copies[lease.state] = self._state_copies.get(node.snapshot, node.snapshot)

    def _copy_begun_block(self, lease: Lease, tokens: tuple[int, ...]) -> None:
        """Copy on write: take over the first tokens of a block that continues with other tokens."""
        match = self._tree.closest(lease.path[-1] if lease.path else lease.root, tokens)
        if match is None or not all(match[0].pages):
            return
        node, same = match
        sources = list(node.pages)  # making room may evict the node; its pages stay as they are until the step
        if not self.grow(lease, lease.cached + same):
            return
        for group, copies in zip(self._groups, self._page_copies, strict=True):
            targets = lease.pages[group.index][len(lease.path) * group.per_block :]
            for source, target in zip(sources[group.index], targets, strict=False):
                if source != target:
                    copies[target] = source
        lease.cached += same

    def grow(self, lease: Lease, length: int) -> bool:
        """Make room for `length` positions, or for those of the next step in groups with a window; all or nothing."""
        if not self._groups:
            return length <= lease.capacity
        counts = []
        for group, pages in zip(self._groups, lease.pages, strict=True):
            end = min(length, lease.next_share + self._max_tokens) if group.window else length
            missing = -(-end // group.page_size) - len(pages)
            if missing > self._available(group):
                return False
            counts.append(missing)
        for group, missing in zip(self._groups, counts, strict=True):
            for _ in range(missing):
                lease.pages[group.index].append(self._take(group))
        lease.changes += max(counts) > 0
        lease.capacity = min(
            [len(pages) * group.page_size for group, pages in zip(self._groups, lease.pages, strict=True)]
        )
        return True

    def _available(self, group: Group) -> int:
        """Pages that are free or can be evicted."""
        unused = len(group.unread) if group.window else self._tree.num_unused
        return len(group.pool) + unused * group.per_block

    def _take(self, group: Group) -> int:
        if not len(group.pool):
            if group.window:
                self._evict_pages(group)
            else:
                self._strip(self._tree.evict())
        return group.pool.take()

    def _evict_pages(self, group: Group) -> None:
        """Evict the pages of the least recently used node that no lease reads, in a group with a window."""
        node, _ = group.unread.popitem(last=False)
        for page in node.pages[group.index]:
            group.pool.give_back(page)
        node.pages[group.index] = ()
        self._tree.prune(node)

    def _strip(self, node: Node) -> None:
        """Free everything of a node that left the tree."""
        for group, pages in zip(self._groups, node.pages, strict=True):
            group.unread.pop(node, None)
            for page in pages:
                group.pool.give_back(page)
        if node.snapshot >= 0:
            del self._snapshots[node]
            self._free_snapshot(node.snapshot)

    def share(self, lease: Lease, tokens: list[int], computed: int) -> None:
        """Let others find the full blocks of tokens[:computed], as far as the tokens are known.

        Launched steps write them. Call it after the batch of the step is built: it may replace pages by equal ones.
        """
        if computed < lease.next_share:
            return
        if self.snapshot_interval:
            self._snapshot(lease, computed)
        for index in range(len(lease.path), min(computed, len(tokens)) // self._block):
            key = tuple(tokens[index * self._block : (index + 1) * self._block])
            parent = lease.path[-1] if lease.path else lease.root
            node = parent.children.get(key)
            if node is None:
                node = self._insert(lease, parent, key, index)
            else:
                self._adopt(lease, node, index)
            lease.path.append(node)
            if lease.snapshot >= 0 and lease.snapshot_at == (index + 1) * self._block:
                self._attach(lease, node)
        lease.next_share = (len(lease.path) + 1) * self._block
        for group in self._windows:
            self._leave(lease, group, min(group.passed(computed, self._block), len(lease.path)))

    def _insert(self, lease: Lease, parent: Node, key: tuple[int, ...], block: int) -> Node:
        pages = [tuple(lease.pages[group.index][group.span(block)]) for group in self._groups]
        return self._tree.insert(parent, key, pages, self._first_readers.copy())

    def _adopt(self, lease: Lease, node: Node, block: int) -> None:
        """Use the equal block of the tree instead of the lease's; fill in the pages that it lacks."""
        self._tree.use(node)
        for group in self._groups:
            index = group.index
            span = group.span(block)
            replaced = lease.pages[index][span]
            if node.pages[index]:
                lease.pages[index][span] = array("i", node.pages[index])
                for page in replaced:
                    self._give_back(group, page)
            else:
                node.pages[index] = tuple(replaced)
            if group.window:
                group.read(node)
        lease.changes += 1

    def _leave(self, lease: Lease, group: Group, passed: int) -> None:
        """Give up the pages of blocks that the window has passed."""
        for block in range(lease.passed[group.index], passed):
            group.leave(lease.path[block])
            lease.pages[group.index][group.span(block)] = array("i", [0] * group.per_block)
            lease.changes += 1
            lease.passed[group.index] = block + 1

    def _snapshot(self, lease: Lease, computed: int) -> None:
        """Copy the state before the next step, where it stands after a full block."""
        if computed % self._block:
            return
        self._drop_snapshot(lease)
        if not self._free_snapshots and self._snapshots:
            node, _ = self._snapshots.popitem(last=False)
            self._free_snapshot(node.snapshot)
            node.snapshot = -1
            self._tree.prune(node)
        if self._free_snapshots:
            lease.snapshot = self._free_snapshots.pop()
            lease.snapshot_at = computed
            self._state_copies[lease.snapshot] = lease.state

    def _attach(self, lease: Lease, node: Node) -> None:
        """Give the lease's snapshot to the block that it stands after."""
        if node.snapshot >= 0:
            self._drop_snapshot(lease)
            return
        node.snapshot = lease.snapshot
        self._snapshots[node] = None
        lease.snapshot = -1

    def _drop_snapshot(self, lease: Lease) -> None:
        if lease.snapshot >= 0:
            self._free_snapshot(lease.snapshot)
            lease.snapshot = -1

    def _free_snapshot(self, snapshot: int) -> None:
        self._state_copies.pop(snapshot, None)
        self._free_snapshots.append(snapshot)

    def step_end(self, start: int, end: int, last: bool) -> int:
        """The end of a step over positions start…end-1: the last border in it, where a snapshot is taken.

        `last`: a row to `end` would draw. Then a border at `end` itself does not count, as a hit never has the last
        token of an equal prompt.
        """
        border = (end - last) // self._block * self._block
        return border if border > start and self.snapshot_interval else end

    def will_find_more(
        self, namespace: Namespace, waiting: list[int], lease: Lease, tokens: list[int], computed: int
    ) -> bool:
        """Once `lease` shares tokens[:computed], open(namespace, waiting) finds a block more than it would now."""
        end = lease.next_share
        if self._num_states:
            if not self.snapshot_interval or computed % self._block:
                return False
            end = max(end, computed)
        return (
            namespace == lease.namespace
            and end <= min(computed, len(tokens), len(waiting) - 1)
            and waiting[:end] == tokens[:end]
        )

    def close(self, lease: Lease) -> None:
        """Free everything of the lease; shared blocks stay for others until their room is needed."""
        for group in self._windows:
            for node in lease.path[lease.passed[group.index] :]:
                group.leave(node)
        for group in self._groups:
            for page in lease.pages[group.index][len(lease.path) * group.per_block :]:
                self._give_back(group, page)
        if lease.state >= 0:
            self._drop_snapshot(lease)
            self._state_copies.pop(lease.state, None)
            self._free_states.append(lease.state)
        if lease.path:
            self._tree.release(lease.path[-1])
            self._tree.prune(lease.path[-1])

    def forget(self) -> None:
        """Evict everything that no lease has."""
        while self._tree.num_unused:
            self._strip(self._tree.evict())
        for group in self._windows:
            while group.unread:
                self._evict_pages(group)
        while self._snapshots:
            node, _ = self._snapshots.popitem()
            self._free_snapshot(node.snapshot)
            node.snapshot = -1

    def _give_back(self, group: Group, page: int) -> None:
        self._page_copies[group.index].pop(page, None)
        group.pool.give_back(page)

    def take_copies(self) -> tuple[Copies, list[tuple[int, int]]]:
        """Copies (source, target) to do before the next step: pages per group, and states. All targets differ."""
        pages = [_taken(copies) if copies else [] for copies in self._page_copies]
        return pages, _taken(self._state_copies)


def _taken(copies: dict[int, int]) -> list[tuple[int, int]]:
    """(source, target) of all copies, which are cleared."""
    pairs = [(source, target) for target, source in copies.items()]
    copies.clear()
    return pairs
