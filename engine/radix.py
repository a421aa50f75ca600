"""The prefix tree: which full pages of KV stand for which tokens. A node is a page, so nodes never split.

    root of a namespace ── [t0 … t15] ── [t16 … t31] ── …      key: the page's tokens; path: the whole context
                                      └─ [t16 … t31'] ── …

A namespace is the adapter value (None: the base model): the same tokens under another adapter are other KV.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Key = tuple[int, ...]
Tokens = TypeVar("Tokens", list[int], Key)


@dataclass(slots=True, eq=False)
class Node:
    """A page of the tree."""

    page: int
    key: Key
    parent: Node | None
    users: int = 0  # leases that hold this page; a lease holds the whole path to its deepest node
    children: dict[Key, Node] = field(default_factory=dict)
    order: list[Key] = field(default_factory=list)  # the children's keys, sorted: neighbours share most tokens


class PrefixTree:
    """Full pages by their tokens, with use counts, and the unused ones in order of their last use."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._roots: dict[Hashable, Node] = {}
        # A path is released from its end, so a child always stands before its parent: the first one is a leaf.
        self._unused: OrderedDict[Node, None] = OrderedDict()

    def root(self, namespace: Hashable) -> Node:
        if namespace not in self._roots:
            self._roots[namespace] = Node(page=0, key=(), parent=None)
        return self._roots[namespace]

    @property
    def num_unused(self) -> int:
        """Pages that no lease holds."""
        return len(self._unused)

    def match(self, node: Node, tokens: Sequence[int], start: int, end: int) -> list[Node]:
        """The longest path below `node` whose pages hold tokens[start:end], full pages only."""
        path: list[Node] = []
        for at in range(start, end - self.page_size + 1, self.page_size):
            child = node.children.get(tuple(tokens[at : at + self.page_size]))
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
        """A lease takes hold of a page (its parents first)."""
        if not node.users:
            del self._unused[node]
        node.users += 1

    def insert(self, parent: Node, key: Key, page: int) -> Node:
        """A new page, held by the lease that computed it."""
        node = Node(page, key, parent, users=1)
        parent.children[key] = node
        parent.order.insert(bisect_left(parent.order, key), key)
        return node

    def release(self, node: Node) -> None:
        """A lease lets go of the path that ends in `node`."""
        above: Node | None = node
        while above is not None and above.parent is not None:
            above.users -= 1
            if not above.users:
                self._unused[above] = None
            above = above.parent

    def evict(self) -> int:
        """Forget the leaf that was unused for the longest time; returns its page. Raises KeyError when all are used."""
        node, _ = self._unused.popitem(last=False)
        assert node.parent is not None
        del node.parent.children[node.key]
        del node.parent.order[bisect_left(node.parent.order, node.key)]
        return node.page

    def nodes(self) -> Iterator[Node]:
        """All pages of all namespaces, for checks."""
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
            assert len(node.key) == self.page_size
            assert (node in self._unused) == (node.users == 0)
            assert node.parent is None or node.users >= sum(child.users for child in node.children.values())
        rank = {node: number for number, node in enumerate(self._unused)}
        assert len(rank) == sum(node.users == 0 for node in nodes)
        for node in rank:
            assert all(rank[child] < rank[node] for child in node.children.values())


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many first tokens are equal; halves the part in doubt with slice comparisons."""
    same, unsure = 0, min(len(a), len(b))
    while same < unsure:
        middle = (same + unsure + 1) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            unsure = middle - 1
    return same
