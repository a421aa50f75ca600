"""The pages of one cache group: free, in use, or cached in the prefix tree."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .pages import PagePool, PendingCopies
from .radix import Node

if TYPE_CHECKING:
    from .runner import CacheGroup


class GroupPages:
    """The pages of one cache group. A lease has `per_block` pages for each block of `block` tokens."""

    def __init__(self, index: int, group: CacheGroup, block: int, *, records_freed: bool = False) -> None:
        self.index = index
        self.block = block
        self.page_size = group.page_size
        self.num_pages = group.num_pages
        self.num_tokens = group.tokens
        self.window = group.window
        self.per_block = block // group.page_size
        self.pool = PagePool(group.num_pages, records_freed=records_freed)
        self.copies = PendingCopies()
        # Only for a group with a window: nodes whose pages no lease reads any more, least recently used first. Their
        # pages can be evicted while the nodes stay in the tree.
        self.unread: OrderedDict[Node, None] = OrderedDict()

    def span(self, block: int) -> slice:
        """The pages of a block, as a slice of the pages of a lease."""
        return slice(block * self.per_block, (block + 1) * self.per_block)

    def first_block(self, position: int) -> int:
        """The index of the first block that `position` and later positions still read."""
        if not self.window:
            return 0
        return max(position - self.window + 1, 0) // self.block

    def has_window(self, path: list[Node], count: int) -> bool:
        """Whether all pages are present that the next position after `count` blocks of `path` reads."""
        first = self.first_block(count * self.block)
        return all(node.pages[self.index] for node in path[first:count])

    def pages_of(self, path: list[Node], first: int) -> array[int]:
        """The pages of a lease that begins with the blocks of `path`. Pages before block `first` are 0."""
        pages = array("i", [0] * (first * self.per_block))
        for node in path[first:]:
            pages.extend(node.pages[self.index])
        return pages

    def enter(self, nodes: list[Node]) -> None:
        """Count one more lease whose window reads these nodes."""
        for node in nodes:
            node.readers[self.index] += 1
            self.unread.pop(node, None)

    def leave(self, nodes: list[Node]) -> None:
        """Count one fewer lease whose window reads these nodes."""
        for node in nodes:
            node.readers[self.index] -= 1
            if not node.readers[self.index]:
                self.unread[node] = None

    def release(self, pages: Iterable[int]) -> None:
        """Free these pages, and cancel pending copies to them."""
        for page in pages:
            self.copies.cancel(page)
            self.pool.release(page)

    def replace(self, pages: Iterable[int], replacements: Iterable[int]) -> None:
        """Free these pages, because a lease uses equal pages instead, and cancel pending copies to them."""
        for page, replacement in zip(pages, replacements, strict=True):
            self.copies.cancel(page)
            self.pool.release(page, replacement)

    def remove(self, node: Node) -> None:
        """Free the pages that the node has in this group."""
        self.unread.pop(node, None)
        self.release(node.pages[self.index])
        node.pages[self.index] = ()

    def evict(self) -> Node:
        """Free the pages of the least recently used unread node. Raises StopIteration if all nodes have readers."""
        node = next(iter(self.unread))
        self.remove(node)
        return node
