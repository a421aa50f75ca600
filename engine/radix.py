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
from typing import TypeVar

Key = tuple[int, ...]
Tokens = TypeVar("Tokens", list[int], Key)


Pages = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """A block of tokens, with its pages in every cache group and perhaps a snapshot of the state after it."""

    pages: list[Pages]  # per group; empty where the pages were evicted, which happens in groups with a window
    key: Key
    parent: Node | None
    users: int = 0  # leases whose path has this node
    readers: list[int] = field(default_factory=list)  # per group: leases whose window has not passed this node
    snapshot: int = -1
    children: dict[Key, Node] = field(default_factory=dict)
    order: list[Key] = field(default_factory=list)  # the children's keys, sorted: neighbours share most tokens

    @property
    def is_empty(self) -> bool:
        """Nothing in the cache belongs to this node."""
        return self.snapshot < 0 and not any(self.pages)


class PrefixTree:
    """Blocks by their tokens, with use counts, and the unused ones in order of their last use."""

    def __init__(self, block: int) -> None:
        """`block`: tokens of a node."""
        self.block = block
        self._roots: dict[Hashable, Node] = {}
        # A path is released from its end, so a child always stands before its parent: the first one is a leaf.
        self._unused: OrderedDict[Node, None] = OrderedDict()

    def root(self, namespace: Hashable) -> Node:
        if namespace not in self._roots:
            self._roots[namespace] = Node(pages=[], key=(), parent=None)
        return self._roots[namespace]

    @property
    def num_unused(self) -> int:
        """Nodes without users."""
        return len(self._unused)

    def match(self, node: Node, tokens: Sequence[int], start: int, end: int) -> list[Node]:
        """The longest path below `node` whose blocks are tokens[start:end], full blocks only."""
        path: list[Node] = []
        for at in range(start, end - self.block + 1, self.block):
            child = node.children.get(tuple(tokens[at : at + self.block]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def closest(self, node: Node, tokens: Key) -> tuple[Node, int] | None:
        """The child of `node` that begins like `tokens` the longest, and how many tokens they share (at least one)."""
        at = bisect_left(node.order, tokens)
        best: tuple[Node, int] | None = None
        for key in node.order[max(at - 1, 0) : at + 1]:
            shared = common_prefix(key, tokens)
            if shared > (best[1] if best else 0):
                best = node.children[key], shared
        return best

    def use(self, node: Node) -> None:
        """Count one more lease on a node (its parents first)."""
        if not node.users:
            del self._unused[node]
        node.users += 1

    def insert(self, parent: Node, key: Key, pages: list[Pages], readers: list[int]) -> Node:
        """A new node with one user, the lease that computed it."""
        node = Node(pages, key, parent, users=1, readers=readers)
        parent.children[key] = node
        parent.order.insert(bisect_left(parent.order, key), key)
        return node

    def release(self, node: Node) -> None:
        """Count one lease less on the path that ends in `node`."""
        above: Node | None = node
        while above is not None and above.parent is not None:
            above.users -= 1
            if not above.users:
                self._unused[above] = None
            above = above.parent

    def evict(self) -> Node:
        """Remove the leaf that was unused for the longest time. Raises KeyError when all nodes have users."""
        node, _ = self._unused.popitem(last=False)
        self._unlink(node)
        return node

    def prune(self, node: Node) -> None:
        """Remove `node` and its ancestors as far as they are unused, empty and without children."""
        at: Node | None = node
        while at is not None and at.parent is not None and not at.users and not at.children and at.is_empty:
            del self._unused[at]
            self._unlink(at)
            at = at.parent

    def _unlink(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
        del node.parent.order[bisect_left(node.parent.order, node.key)]

    def nodes(self) -> Iterator[Node]:
        """All nodes of all namespaces, for checks."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def check(self) -> None:
        """Assert what must always hold of the tree by itself."""
        nodes = list(self.nodes())
        for node in [*nodes, *self._roots.values()]:
            assert sorted(node.children) == node.order
            assert all(child.parent is node and child.key == key for key, child in node.children.items())
        for node in nodes:
            assert len(node.key) == self.block
            assert (node in self._unused) == (node.users == 0)
            assert node.parent is None or node.users >= sum(child.users for child in node.children.values())
        rank = {node: number for number, node in enumerate(self._unused)}
        assert len(rank) == sum(node.users == 0 for node in nodes)
        for node in rank:
            assert all(rank[child] < rank[node] for child in node.children.values())


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many first tokens are equal; halves the part in doubt with slice comparisons."""
    same = 0
    unsure = min(len(a), len(b))
    while same < unsure:
        middle = (same + unsure + 1) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            unsure = middle - 1
    return same
