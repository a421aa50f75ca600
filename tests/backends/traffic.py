"""Requests that come and go on a canary model: joins, leaves, cancels, prefix hits and preemptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from localllm.engine.lora import Adapter
from localllm.engine.runner import Runner

from ..engine.cache_check import check_cache
from . import canary
from .conformance import Conversation, Planned


@dataclass(frozen=True)
class Traffic:
    """`count` requests, some with `adapter`, which changes the key by 2."""

    count: int
    adapter: Adapter
    seed: int
    walk: Callable[[Sequence[int], int], list[int]] = canary.walk

    def check(self, runner: Runner, *, overlap: bool) -> None:
        """Check that the runner draws no wrong token, and that the cache loses no page."""
        talk = Conversation(Planned(runner, overlap=overlap))
        talk.engine.register_adapter(self.adapter)
        rng = np.random.default_rng(self.seed)
        bases = [canary.prompt(key, 70, seed=key) for key in range(canary.KEYS)]
        expected: dict[str, list[int]] = {}
        while len(expected) < self.count or talk.engine.has_work:
            if len(expected) < self.count and rng.random() < 0.5:
                base = bases[int(rng.integers(canary.KEYS))]
                tail = rng.integers(0, canary.SYMBOLS, int(rng.integers(1, 12))).tolist()
                prompt = [*base[: int(rng.integers(22, 70))], *tail]
                shift = 2 * int(rng.random() < 0.3)
                name = f"r{len(expected)}"
                length = int(rng.integers(1, 45))
                expected[name] = self.walk(canary.under(prompt, shift), length)
                talk.submit(name, prompt, length, adapter=self.adapter if shift else None)
            if expected and rng.random() < 0.05:
                talk.engine.cancel(str(rng.choice(list(expected))))
            talk.step()
        for name, tokens in expected.items():
            assert talk.tokens[name] == tokens[: len(talk.tokens[name])], name
        stats = talk.engine.stats()
        assert stats.preemptions > 0
        assert stats.prefix_hit_tokens > self.count
        ends = [reason != "length" for reason in talk.finishes.values()]
        assert 0 < sum(ends) < self.count / 2, "some were cancelled, not most"
        cache = talk.engine._scheduler._cache
        check_cache(cache, [])
        cache.evict_all()
        assert [len(group.pool) for group in cache._groups] == [group.num_pages for group in runner.spec.groups]
        states = cache._states
        assert (states.num_used, len(states._free_snapshots)) == (0, runner.spec.num_snapshots)
