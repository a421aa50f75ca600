"""The pages of one cache group, and which of them can be evicted."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

from .pages import PagePool
from .radix import Node

if TYPE_CHECKING:
    from .runner import CacheGroup


class Group:
    """The pages of one cache group."""

    def __init__(self, index: int, group: CacheGroup, block: int) -> None:
        self.index = index
        self.page_size = group.page_size
        self.num_pages = group.num_pages
        self.window = group.window
        self.per_block = block // group.page_size
        self.pool = PagePool(group.num_pages)
        # With a window: nodes whose pages no lease reads, least recently used first. Their pages can be evicted alone.
        self.unread: OrderedDict[Node, None] = OrderedDict()

    def span(self, block: int) -> slice:
        """The pages of a block, in a lease's."""
        return slice(block * self.per_block, (block + 1) * self.per_block)

    def passed(self, computed: int, block: int) -> int:
        """Blocks that no position from `computed` on reads."""
        return max(computed - self.window + 1, 0) // block if self.window else 0

    def read(self, node: Node) -> None:
        """Count one more lease whose window has not passed the node."""
        node.readers[self.index] += 1
        self.unread.pop(node, None)

    def leave(self, node: Node) -> None:
        """Count one such lease less."""
        node.readers[self.index] -= 1
        if not node.readers[self.index]:
            self.unread[node] = None

    def pages_of(self, path: list[Node], passed: int) -> array[int]:
        """A lease's pages in this group, of a path of which the window has passed the first blocks."""
        pages = array("i", [0] * (passed * self.per_block))
        for node in path[passed:]:
            pages.extend(node.pages[self.index])
        return pages
