"""The invariants of the cache, between any two steps."""

from __future__ import annotations

from localllm.engine.groups import GroupPages
from localllm.engine.kv import KVCache, Lease
from localllm.engine.radix import Node, PrefixTree


def check_cache(cache: KVCache, leases: list[Lease]) -> None:
    """Assert that every page, state and snapshot has one place, when `leases` are the open ones."""
    _check_tree(cache._tree)
    nodes = list(cache._tree.nodes())
    for group in cache._groups:
        _check_group(cache, group, leases, nodes)
    _check_paths(cache, leases, nodes)
    _check_states(cache, leases, nodes)


def _check_group(cache: KVCache, group: GroupPages, leases: list[Lease], nodes: list[Node]) -> None:
    index = group.index
    unshared = [page for lease in leases for page in lease.pages[index][len(lease.path) * group.per_block :]]
    shared = [page for node in nodes for page in node.pages[index]]
    assert sorted([*group.pool.free(), *unshared, *shared]) == list(range(1, group.num_pages + 1))
    assert set(group.copies._sources) <= set(unshared)
    for lease in leases:
        first = lease.first_blocks[index]
        assert not any(lease.pages[index][: first * group.per_block])
        cached = [page for node in lease.path[first:] for page in node.pages[index]]
        assert lease.pages[index][first * group.per_block : len(lease.path) * group.per_block].tolist() == cached
        assert lease.capacity <= len(lease.pages[index]) * group.page_size
    if not group.window:
        assert all(len(node.pages[index]) == group.per_block for node in nodes)
        return
    readers = dict.fromkeys(nodes, 0)
    for lease in leases:
        for node in lease.path[lease.first_blocks[index] :]:
            readers[node] += 1
    assert all(node.readers[index] == count for node, count in readers.items())
    assert set(group.unread) == {node for node in nodes if node.pages[index] and not readers[node]}


def _check_paths(cache: KVCache, leases: list[Lease], nodes: list[Node]) -> None:
    users = dict.fromkeys(nodes, 0)
    for lease in leases:
        parent = cache._tree.root(lease.namespace)
        for node in lease.path:
            assert node.parent is parent
            users[node] += 1
            parent = node
        assert lease.next_share == (len(lease.path) + 1) * cache._block
    assert all(node.users == count for node, count in users.items())
    assert not any(node.is_empty and not node.users and not node.children for node in nodes), "to be pruned"


def _check_states(cache: KVCache, leases: list[Lease], nodes: list[Node]) -> None:
    pool = cache._states
    states = [lease.state for lease in leases if lease.state >= 0]
    assert sorted([*pool._free, *states]) == list(range(pool.num_states))
    cached = [node.snapshot for node in nodes if node.snapshot >= 0]
    snapshots = [*pool._free_snapshots, *cached, *(lease.snapshot for lease in leases if lease.snapshot >= 0)]
    assert sorted(snapshots) == list(range(pool.num_states, pool.num_states + len(snapshots)))
    assert set(pool._nodes) == {node for node in nodes if node.snapshot >= 0}
    assert not set(pool.copies._sources) & set(pool._free_snapshots)
    assert not set(pool.copies._sources) & set(pool._free)


def _check_tree(tree: PrefixTree) -> None:
    nodes = list(tree.nodes())
    for node in [*nodes, *tree._roots.values()]:
        assert sorted(node.children) == node.order
        assert all(child.parent is node and child.key == key for key, child in node.children.items())
    for node in nodes:
        assert len(node.key) == tree.block
        assert (node in tree._unused) == (node.users == 0)
        assert node.parent is None or node.users >= sum(child.users for child in node.children.values())
    assert tree.num_unused_leaves == sum(not node.users and not node.children for node in nodes)
    rank = {node: number for number, node in enumerate(tree._unused)}
    assert len(rank) == sum(node.users == 0 for node in nodes)
    for node in rank:
        assert all(rank[child] < rank[node] for child in node.children.values())
