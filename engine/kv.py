"""Cache memory: the pages and states of each sequence, and prefix hits in the memory of other sequences. Integers only.

A sequence has pages in every cache group and, if the runner has recurrent states, a state slot. Full blocks of tokens
enter the prefix tree; the size of a block is a multiple of every group's page size. A prefix hit ends

    after a block: the pages that later positions read are present in all groups, and the block has a snapshot of
    the state if the runner has states;
    or, without states, within the next block, which is copied (copy on write).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

from .groups import GroupPages
from .radix import Node, PrefixTree
from .states import StatePool

if TYPE_CHECKING:
    from .lora import Namespace
    from .runner import RunnerSpec

BLOCK_WITHOUT_PAGES = 16
Copies = list[list[tuple[int, int]]]  # for each cache group: copies (source page, target page)


@dataclass(slots=True, eq=False)
class Lease:
    """The cache memory of one sequence. `pages` may change between steps; each change increases `changes`."""

    namespace: Namespace
    cached: int  # positions at the start whose KV was in the cache
    capacity: int  # positions that fit into the pages; KVCache.grow increases it
    pages: tuple[array[int], ...]  # for each cache group: the pages in order of position; 0: before the window
    root: Node
    path: list[Node]  # the sequence's blocks in the prefix tree, the first block first
    next_share: int  # KVCache.share adds a block to the tree once this many positions are computed
    first_blocks: list[int]  # for each cache group: index of the first block that the window still reads
    changes: int = 0  # number of changes to `pages`
    state: int = -1  # slot of the recurrent state
    snapshot: int = -1  # id of a snapshot whose block is not in the tree yet; -1: none
    snapshot_at: int = 0  # number of positions after which the snapshot was taken

    @property
    def node(self) -> Node:
        """The sequence's last block in the prefix tree; the root if it has no block there."""
        return self.path[-1] if self.path else self.root


class KVCache:
    """Cache memory of one runner. Not thread-safe.

    Steps run in the order of their launch. So the memory of a closed lease may be reused at once, and positions that a
    launched step writes may be shared at once.
    """

    def __init__(self, spec: RunnerSpec) -> None:
        """Raises ValueError for a group with a window that is too small for one sequence, and for fewer paths than
        rows."""
        if 0 < spec.max_paths < spec.max_rows:
            raise ValueError(f"{spec.max_rows} rows need as many paths, not {spec.max_paths}")
        self._max_context = spec.max_context
        self._max_tokens = spec.max_tokens
        self._block = _block_size(spec)
        self.snapshot_interval = self._block if spec.num_snapshots else 0  # 0: no snapshots
        self._states = StatePool(spec.num_states, spec.num_snapshots)
        self._max_paths = spec.max_paths
        self._num_leases = 0
        self._groups = [
            GroupPages(index, group, self._block, records_freed=spec.max_paths > 0)
            for index, group in enumerate(spec.groups)
        ]
        self._windows = [group for group in self._groups if group.window]
        self._first_readers = [int(group.window > 0) for group in self._groups]
        self._tree = PrefixTree(self._block)
        # total_tokens and used_tokens describe this group: the first without a window, if there is one.
        self._main_group = min(self._groups, key=lambda group: group.window > 0, default=None)
        for group in self._windows:
            self._check_window(group)

    def _check_window(self, group: GroupPages) -> None:
        needed = min(self._max_context, group.window + self._max_tokens + 3 * self._block)
        if group.num_tokens < needed:
            raise ValueError(f"a window of {group.window} needs pages for {needed} positions, not {group.num_tokens}")

    @property
    def total_tokens(self) -> int:
        """The number of positions that fit into the main group's pages: the first group without a window, if there is
        one. For a runner that has only states: the positions of one sequence, times the number of states."""
        if self._main_group is None:
            return self._states.num_states * self._max_context
        return self._main_group.num_tokens

    @property
    def used_tokens(self) -> int:
        """The part of `total_tokens` that leases use. Memory that is only cached for prefix hits does not count."""
        if self._main_group is None:
            return self._states.num_used * self._max_context
        return self._main_group.num_tokens - self._available(self._main_group) * self._main_group.page_size

    def open(self, namespace: Namespace, tokens: list[int]) -> Lease | None:
        """A lease for a sequence that begins with `tokens`. It has the pages of the longest cached prefix, which
        never includes the last token, because its logits must be computed. None: no slot for a recurrent state is
        free."""
        if self._states.is_full:
            return None
        root = self._tree.root(namespace)
        path = self._tree.match(root, tokens, 0, len(tokens) - 1)
        del path[self._hit_length(path) :]
        for node in path:
            self._tree.use(node)
        self._num_leases += 1
        self._limit_paths()
        lease = self._lease(namespace, root, path)
        if self._states.num_states:
            lease.state = self._states.allocate(lease.node)
        else:
            end = min(lease.cached + self._block, len(tokens) - 1)
            self._copy_begun_block(lease, tuple(tokens[lease.cached : end]))
        return lease

    def _limit_paths(self) -> None:
        """Evict cached blocks until the leases and the cached paths are not more than the runner allows."""
        while self._max_paths and self._num_leases + self._tree.num_unused_leaves > self._max_paths:
            self._remove(self._tree.evict())

    def _lease(self, namespace: Namespace, root: Node, path: list[Node]) -> Lease:
        """A lease that begins with the cached blocks of `path`."""
        cached = len(path) * self._block
        first_blocks = [group.first_block(cached) for group in self._groups]
        pages = [group.pages_of(path, first) for group, first in zip(self._groups, first_blocks, strict=True)]
        for group in self._windows:
            group.enter(path[first_blocks[group.index] :])
        capacity = cached if self._groups else self._max_context
        return Lease(namespace, cached, capacity, tuple(pages), root, path, cached + self._block, first_blocks)

    def _hit_length(self, path: list[Node]) -> int:
        """The number of blocks in the longest prefix hit on this path."""
        for count in range(len(path), 0, -1):
            if self._is_hit(path, count):
                return count
        return 0

    def _is_hit(self, path: list[Node], count: int) -> bool:
        """Whether a sequence can continue after `count` blocks of `path`."""
        if self._states.num_states and path[count - 1].snapshot < 0:
            return False
        return all(group.has_window(path, count) for group in self._windows)

    def _copy_begun_block(self, lease: Lease, tokens: tuple[int, ...]) -> None:
        """Copy on write: if the tree has a block that begins with some of these tokens, copy its pages to the lease."""
        match = self._tree.closest(lease.node, tokens)
        if match is None or not all(match.node.pages):
            return
        sources = list(match.node.pages)  # `grow` may evict the node, but its pages are unchanged until the step
        if not self.grow(lease, lease.cached + match.length):
            return
        for group in self._groups:
            targets = lease.pages[group.index][len(lease.path) * group.per_block :]
            for source, target in zip(sources[group.index], targets, strict=False):
                if source != target:
                    group.copies.add(source, target)
                else:  # `grow` evicted the node, and the lease got the same page
                    group.pool.keep(source)
        lease.cached += match.length

    def grow(self, lease: Lease, length: int) -> bool:
        """Allocate pages for `length` positions; in groups with a window, only those that the next step needs. Returns
        False, without any change, if the pages do not suffice."""
        if not self._groups:
            return length <= lease.capacity
        missing = [self._missing(group, lease, length) for group in self._groups]
        for group, count in zip(self._groups, missing, strict=True):
            if count > self._available(group):
                return False
        for group, count in zip(self._groups, missing, strict=True):
            lease.pages[group.index].extend([self._allocate(group) for _ in range(count)])
        lease.changes += max(missing) > 0
        lease.capacity = min([len(lease.pages[group.index]) * group.page_size for group in self._groups])
        return True

    def _missing(self, group: GroupPages, lease: Lease, length: int) -> int:
        """The number of pages that the lease lacks for `length` positions; 0 or negative if it has enough."""
        if group.window:
            length = min(length, lease.next_share + self._max_tokens)
        return -(-length // group.page_size) - len(lease.pages[group.index])

    def _available(self, group: GroupPages) -> int:
        """The number of pages that are free or can be evicted."""
        unused = len(group.unread) if group.window else self._tree.num_unused
        return len(group.pool) + unused * group.per_block

    def _allocate(self, group: GroupPages) -> int:
        if not len(group.pool):
            if group.window:
                self._tree.prune(group.evict())
            else:
                self._remove(self._tree.evict())
        return group.pool.allocate()

    def _remove(self, node: Node) -> None:
        """Free the pages and the snapshot of a node that was removed from the tree."""
        for group in self._groups:
            group.remove(node)
        self._states.remove(node)

    def share(self, lease: Lease, tokens: list[int], computed: int) -> None:
        """Add the full blocks of tokens[:computed] to the prefix tree. A block with a token that is not known yet
        follows later.

        The KV of these blocks may be written by steps that are launched and still run. Call this after the batch of the
        step is built, because it may replace pages of the lease by equal pages of the tree.
        """
        if computed < lease.next_share:
            return
        if self.snapshot_interval:
            self._save_state(lease, computed)
        for block in range(len(lease.path), min(computed, len(tokens)) // self._block):
            end = (block + 1) * self._block
            key = tuple(tokens[end - self._block : end])
            node = lease.node.children.get(key)
            if node is None:
                node = self._insert(lease, key, block)
            else:
                self._adopt(lease, node, block)
            lease.path.append(node)
            if lease.snapshot >= 0 and lease.snapshot_at == end:
                self._states.attach(lease.snapshot, node)
                lease.snapshot = -1
        lease.next_share = (len(lease.path) + 1) * self._block
        for group in self._windows:
            self._move_window(lease, group, min(group.first_block(computed), len(lease.path)))

    def _insert(self, lease: Lease, key: tuple[int, ...], block: int) -> Node:
        pages = [tuple(lease.pages[group.index][group.span(block)]) for group in self._groups]
        return self._tree.insert(lease.node, key, pages, self._first_readers.copy())

    def _adopt(self, lease: Lease, node: Node, block: int) -> None:
        """Replace a block of the lease by the equal block `node` of the tree. If the node lacks pages, it gets those of
        the lease."""
        self._tree.use(node)
        for group in self._groups:
            index = group.index
            span = group.span(block)
            replaced = lease.pages[index][span]
            if node.pages[index]:
                lease.pages[index][span] = array("i", node.pages[index])
                group.replace(replaced, node.pages[index])
            else:
                node.pages[index] = tuple(replaced)
        for group in self._windows:
            group.enter([node])
        lease.changes += 1

    def _move_window(self, lease: Lease, group: GroupPages, first: int) -> None:
        """Record that the window of the lease has passed all blocks before block `first`."""
        passed = range(lease.first_blocks[group.index], first)
        group.leave(lease.path[passed.start : first])
        for block in passed:
            lease.pages[group.index][group.span(block)] = array("i", [0] * group.per_block)
        lease.changes += len(passed)
        lease.first_blocks[group.index] = max(first, passed.start)

    def _save_state(self, lease: Lease, computed: int) -> None:
        """Save a snapshot of the state before the next step, if the computed positions end with a full block."""
        if computed % self._block:
            return
        self._states.drop(lease.snapshot)
        node = self._states.evict()
        if node is not None:
            self._tree.prune(node)
        lease.snapshot = self._states.save(lease.state)
        lease.snapshot_at = computed

    def step_end(self, start: int, end: int, last: bool) -> int:
        """Where a row over positions start…end-1 should end: at its last block border, so that a snapshot can be taken
        there. `end` if there is no border, or if there are no snapshots.

        `last`: a row up to `end` would draw a token. Then a border at `end` does not count: a prefix hit of an equal
        prompt would not include the last token.
        """
        border = (end - last) // self._block * self._block
        return border if border > start and self.snapshot_interval else end

    def will_find_more(
        self, namespace: Namespace, waiting: list[int], lease: Lease, tokens: list[int], computed: int
    ) -> bool:
        """Whether a prefix hit of the waiting tokens gets longer once `lease` has shared tokens[:computed].

        `waiting`: the tokens of a sequence without a lease. `tokens`: the tokens of the sequence with `lease`."""
        end = lease.next_share
        if self._states.num_states:
            if not self.snapshot_interval or computed % self._block:
                return False
            end = max(end, computed)
        if namespace != lease.namespace or end > min(computed, len(tokens), len(waiting) - 1):
            return False
        return waiting[:end] == tokens[:end]

    def close(self, lease: Lease) -> None:
        """Free the memory of the lease. Its blocks in the tree stay cached until they are evicted."""
        self._num_leases -= 1
        for group in self._windows:
            group.leave(lease.path[lease.first_blocks[group.index] :])
        for group in self._groups:
            group.release(lease.pages[group.index][len(lease.path) * group.per_block :])
        if lease.state >= 0:
            self._states.drop(lease.snapshot)
            self._states.release(lease.state)
        if lease.path:
            self._tree.release(lease.node)
            self._tree.prune(lease.node)

    def evict_all(self) -> None:
        """Free all cached memory that no lease uses."""
        while self._tree.num_unused:
            self._remove(self._tree.evict())
        for group in self._windows:
            while group.unread:
                self._tree.prune(group.evict())
        self._states.evict_all()

    def take_copies(self) -> tuple[Copies, list[tuple[int, int]]]:
        """(page copies of each cache group, state copies) that must be made before the next step, as (source, target).
        All targets differ. Afterwards no copy is pending."""
        return [group.copies.drain() for group in self._groups], self._states.copies.drain()

    def take_freed(self) -> list[list[tuple[int, int]]]:
        """For each cache group: the pages that were freed since the last call, as Batch.freed_pages lists them."""
        return [group.pool.take_freed() for group in self._groups]


def _block_size(spec: RunnerSpec) -> int:
    """The number of tokens in a block: a multiple of all page sizes and, if the runner has states, of the snapshot
    interval."""
    sizes = [group.page_size for group in spec.groups]
    if spec.num_states and spec.snapshot_interval:
        sizes.append(spec.snapshot_interval)
    return lcm(*(sizes or [BLOCK_WITHOUT_PAGES]))
