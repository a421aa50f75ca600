"""The prefix tree: the cached blocks of tokens. A node is a block of fixed size, so nodes never split.

    root of a namespace ── [t0 … t15] ── [t16 … t31] ── …      key: the block's tokens; path: the whole context
                                      └─ [t16 … t31'] ── …

A namespace is adapter and scale (None: the base model): the same tokens under another adapter have other KV.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

Key = tuple[int, ...]
Pages = tuple[int, ...]
Tokens = TypeVar("Tokens", list[int], Key)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Node:
    """A block of tokens, its pages in every cache group, and the snapshot of the state after it, if there is one."""

    pages: list[Pages]  # for each cache group: the block's pages; empty if they were evicted (groups with a window)
    key: Key
    parent: Node | None
    users: int = 0  # number of leases whose path contains this node
    # For each cache group: the number of leases whose window still includes this node.
    readers: list[int] = field(default_factory=list)
    snapshot: int = -1  # id of the snapshot; -1: no snapshot
    children: dict[Key, Node] = field(default_factory=dict)
    order: list[Key] = field(default_factory=list)  # the children's keys, sorted: neighbours share most tokens

    @property
    def is_empty(self) -> bool:
        """Whether the node has no pages and no snapshot."""
        return self.snapshot < 0 and not any(self.pages)

    @property
    def is_prunable(self) -> bool:
        """Whether the node has no lease, no child, no pages and no snapshot."""
        return not self.users and not self.children and self.is_empty


class Match(NamedTuple):
    """A cached block whose first tokens equal those of a search."""

    node: Node
    length: int  # number of equal tokens


class PrefixTree:
    """All cached blocks, with the number of leases on each. Blocks without leases are in order of their last use."""

    def __init__(self, block: int) -> None:
        """`block`: number of tokens in a node."""
        self.block = block
        # A root lives as long as a child or a lease refers to it, so namespaces without cached blocks take no memory.
        self._roots: WeakValueDictionary[Hashable, Node] = WeakValueDictionary()
        # A path is released from its end, so a child comes before its parent, and the first node is a leaf.
        self._unused: OrderedDict[Node, None] = OrderedDict()
        self.num_unused_leaves = 0  # number of nodes without users and without children

    def root(self, namespace: Hashable) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = Node(pages=[], key=(), parent=None)
            self._roots[namespace] = root
        return root

    @property
    def num_unused(self) -> int:
        """Number of nodes without users."""
        return len(self._unused)

    def match(self, node: Node, tokens: Sequence[int], start: int, end: int) -> list[Node]:
        """The longest path of nodes below `node` whose tokens equal the tokens from `start` on, up to `end` at most."""
        path: list[Node] = []
        for first in range(start, end - self.block + 1, self.block):
            child = node.children.get(tuple(tokens[first : first + self.block]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def closest(self, node: Node, tokens: Key) -> Match | None:
        """The child of `node` with the longest prefix in common with `tokens`; None if no child shares a token."""
        index = bisect_left(node.order, tokens)
        neighbours = node.order[max(index - 1, 0) : index + 1]
        if not neighbours:
            return None
        key = max(neighbours, key=lambda key: common_prefix(key, tokens))
        length = common_prefix(key, tokens)
        return Match(node.children[key], length) if length else None

    def use(self, node: Node) -> None:
        """Count one more lease on a node. The caller counts the parents first."""
        if not node.users:
            del self._unused[node]
            self.num_unused_leaves -= not node.children
        node.users += 1

    def insert(self, parent: Node, key: Key, pages: list[Pages], readers: list[int]) -> Node:
        """A new node with one user, the lease that computed it."""
        node = Node(pages, key, parent, users=1, readers=readers)
        parent.children[key] = node
        parent.order.insert(bisect_left(parent.order, key), key)
        return node

    def release(self, node: Node) -> None:
        """Count one lease less on the path that ends in `node`."""
        while node.parent is not None:
            node.users -= 1
            if not node.users:
                self._unused[node] = None
                self.num_unused_leaves += not node.children
            node = node.parent

    def evict(self) -> Node:
        """Remove the leaf whose last use is longest ago. Raises KeyError if all nodes have users."""
        node, _ = self._unused.popitem(last=False)
        self._unlink(node)
        return node

    def prune(self, node: Node) -> None:
        """Remove `node` if it is prunable, then its parent if that is prunable now, and so on."""
        while node.parent is not None and node.is_prunable:
            del self._unused[node]
            self._unlink(node)
            node = node.parent

    def _unlink(self, node: Node) -> None:
        """Remove a leaf without users."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        del parent.order[bisect_left(parent.order, node.key)]
        self.num_unused_leaves -= 1
        if parent in self._unused and not parent.children:
            self.num_unused_leaves += 1

    def nodes(self) -> Iterator[Node]:
        """All nodes of all namespaces, for checks."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node


def common_prefix(a: Tokens, b: Tokens) -> int:
    """The number of first tokens that are equal: a binary search with slice comparisons."""
    low = 0
    high = min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
