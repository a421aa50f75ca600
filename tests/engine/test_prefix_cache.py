"""Random operations on KVCache against a plain model: a dict of prefixes, searched by brute force."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from localllm.engine.kv import KVCache, Lease
from localllm.engine.lora import Adapter
from localllm.engine.runner import CacheGroup, RunnerSpec

from .cache_check import check_cache

NAMESPACES = (None, Adapter("a", "/a", "1"), Adapter("a", "/a", "2"))
Prefix = tuple[Adapter | None, tuple[int, ...]]


@dataclass
class Entry:
    """A full page that stands for a whole prefix."""

    users: int
    released: int = 0  # when the last user let go


@dataclass
class Sequence:
    lease: Lease
    tokens: list[int]
    computed: int
    own: int = 0  # pages that are not shared


@dataclass
class PlainCache:
    """The simplest model of the behaviour of KVCache."""

    num_pages: int
    size: int
    entries: dict[Prefix, Entry] = field(default_factory=dict)
    own: int = 0
    clock: int = 0

    def free(self) -> int:
        return self.num_pages - self.own - len(self.entries)

    def room(self) -> int:
        return self.free() + sum(not entry.users for entry in self.entries.values())

    def prefixes(self, namespace: Adapter | None, tokens: list[int], full: int) -> list[Prefix]:
        return [(namespace, tuple(tokens[: count * self.size])) for count in range(1, full + 1)]

    def match(self, namespace: Adapter | None, tokens: list[int]) -> tuple[int, int]:
        """Full pages that are there, and how many more tokens a copy of another page would give."""
        usable, full = tokens[:-1], 0
        for prefix in self.prefixes(namespace, usable, len(usable) // self.size):
            if prefix not in self.entries:
                break
            full += 1
        start = full * self.size
        best = 0
        for owner, known in self.entries:
            if owner == namespace and len(known) == start + self.size and known[:start] == tuple(tokens[:start]):
                same = 0
                while same < self.size and start + same < len(usable) and known[start + same] == tokens[start + same]:
                    same += 1
                best = max(best, same)
        return full, best

    def take(self, count: int) -> None:
        for _ in range(count - self.free()):
            leaves = [
                prefix
                for prefix, entry in self.entries.items()
                if not entry.users
                and not any(
                    owner == prefix[0] and len(known) > len(prefix[1]) and known[: len(prefix[1])] == prefix[1]
                    for owner, known in self.entries
                )
            ]
            del self.entries[min(leaves, key=lambda leaf: self.entries[leaf].released)]
        self.own += count

    def release(self, prefixes: list[Prefix]) -> None:
        for prefix in reversed(prefixes):
            self.clock += 1
            entry = self.entries[prefix]
            entry.users -= 1
            entry.released = self.clock


class Machine:
    """One KVCache, the plain model beside it, and a memory that holds each page's tokens."""

    def __init__(self, seed: int, size: int, num_pages: int) -> None:
        self.random, self.size = random.Random(seed), size
        self.kv, self.plain = (
            KVCache(RunnerSpec(10, 8, 4, 10**6, (CacheGroup(size, num_pages),))),
            PlainCache(num_pages, self.size),
        )
        self.memory: dict[tuple[int, int], int] = {}
        self.sequences: list[Sequence] = []
        self.hits = self.copied = self.swaps = self.refusals = 0

    def prefixes(self, sequence: Sequence) -> list[Prefix]:
        return self.plain.prefixes(sequence.lease.namespace, sequence.tokens, len(sequence.lease.path))

    def open(self) -> None:
        namespace = self.random.choice(NAMESPACES)
        tokens = [self.random.choice([7] * 9 + [8]) for _ in range(self.random.randrange(1, 5 * self.size))]
        full, partial = self.plain.match(namespace, tokens)
        for prefix in self.plain.prefixes(namespace, tokens, full):
            self.plain.entries[prefix].users += 1
        copied = partial > 0 and self.plain.room() > 0
        if copied:
            self.plain.take(1)
        lease = self.kv.open(namespace, tokens)
        assert lease.cached == full * self.size + (partial if copied else 0)
        assert len(lease.pages[0]) == full + copied
        self.sequences.append(Sequence(lease, tokens, lease.cached, own=int(copied)))
        self.hits += full
        self.copied += copied
        self.run_copies()
        assert self.content(lease, lease.cached) == tokens[: lease.cached]

    def run_copies(self) -> None:
        [copies], _ = self.kv.take_copies()
        assert len({target for _, target in copies}) == len(copies)
        sources = [[self.memory.get((source, at)) for at in range(self.size)] for source, _ in copies]
        for (_, target), content in zip(copies, sources, strict=True):
            for at, token in enumerate(content):
                if token is not None:
                    self.memory[target, at] = token

    def content(self, lease: Lease, length: int) -> list[int]:
        return [self.memory[lease.pages[0][at // self.size], at % self.size] for at in range(length)]

    def compute(self) -> None:
        sequence = self.random.choice(self.sequences)
        if self.random.random() < 0.5:
            sequence.tokens.append(self.random.choice([7, 7, 8]))
        length = min(sequence.computed + self.random.randrange(1, 3 * self.size), len(sequence.tokens))
        missing = -(-length // self.size) - len(sequence.lease.pages[0])
        fits = missing <= self.plain.room()
        assert self.kv.grow(sequence.lease, length) == fits
        if not fits:
            self.refusals += 1
            return
        if missing > 0:
            self.plain.take(missing)
            sequence.own += missing
        for at in range(sequence.computed, length):
            self.memory[sequence.lease.pages[0][at // self.size], at % self.size] = sequence.tokens[at]
        sequence.computed = length
        assert sequence.lease.capacity >= length

    def share(self) -> None:
        sequence = self.random.choice(self.sequences)
        shared, full = len(sequence.lease.path), sequence.computed // self.size
        for prefix in self.plain.prefixes(sequence.lease.namespace, sequence.tokens, full)[shared:]:
            self.swaps += prefix in self.plain.entries
            self.plain.entries.setdefault(prefix, Entry(users=0)).users += 1
            self.plain.own -= 1
            sequence.own -= 1
        ahead = self.random.randrange(3) if sequence.computed == len(sequence.tokens) else 0  # unknown tokens
        self.kv.share(sequence.lease, sequence.tokens, sequence.computed + ahead)
        assert len(sequence.lease.path) == max(shared, full)
        assert self.content(sequence.lease, sequence.computed) == sequence.tokens[: sequence.computed]

    def close(self) -> None:
        sequence = self.sequences.pop(self.random.randrange(len(self.sequences)))
        self.plain.release(self.prefixes(sequence))
        self.plain.own -= sequence.own
        self.kv.close(sequence.lease)

    def step(self) -> None:
        if not self.sequences or self.random.random() < 0.2:
            self.open()
        else:
            self.random.choices([self.compute, self.share, self.close], [5, 4, 2])[0]()
        check_cache(self.kv, [sequence.lease for sequence in self.sequences])
        held = self.plain.own + sum(entry.users > 0 for entry in self.plain.entries.values())
        assert self.kv.used_tokens == held * self.size
        assert {self.path(node) for node in self.kv._tree.nodes()} == set(self.plain.entries)

    def path(self, node) -> Prefix:
        tokens: tuple[int, ...] = ()
        while node.parent is not None:
            tokens, node = node.key + tokens, node.parent
        return next(space for space in NAMESPACES if self.kv._tree.root(space) is node), tokens


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_random_operations_equal_the_plain_model(size: int) -> None:
    machines = [Machine(seed, size, num_pages) for seed in range(2) for num_pages in (6, 12, 30)]
    for machine in machines:
        for _ in range(700):
            machine.step()
    for count in ("hits", "swaps", "refusals", "copied"):  # all of it did happen
        assert sum(getattr(machine, count) for machine in machines) >= (0 if (count, size) == ("copied", 1) else 15)
