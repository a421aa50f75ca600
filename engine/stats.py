"""Counters of one engine, as the daemon shows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """A snapshot; the counters only grow, the first four fields are of the moment."""

    running: int = 0  # sequences that hold cache memory
    waiting: int = 0
    cache_tokens: int = 0  # what all KV memory holds
    cache_used: int = 0  # of that, held by running sequences; the rest is free or kept for prefix hits
    steps: int = 0
    tokens_in: int = 0  # prompt tokens of requests that were started
    tokens_out: int = 0
    prefix_hit_tokens: int = 0  # of tokens_in, those that came from the cache
    preemptions: int = 0
    late_compiles: int = 0  # parts of the model that were compiled once more, while requests waited
    step_host_seconds: float = 0.0  # planning and taking in steps: what the engine itself costs
    step_seconds: float = 0.0  # all of it, the backend's work included
    step_age: float = 0.0  # seconds since the step under way began, 0 between steps: hangs show in it
