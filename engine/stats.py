"""Counters of one engine, for display by the daemon."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """The counters at one time. The first four fields and `step_age` are current values; all other fields only grow."""

    running: int = 0  # sequences with cache memory
    waiting: int = 0
    cache_tokens: int = 0  # positions that fit into the whole cache
    cache_used: int = 0  # positions that running sequences use; the others are free or cached for prefix hits
    steps: int = 0
    tokens_in: int = 0  # prompt tokens of requests that were started
    tokens_out: int = 0
    prefix_hit_tokens: int = 0  # how many of tokens_in came from the prefix cache
    preemptions: int = 0
    late_compiles: int = 0  # parts of the model that were compiled again while requests waited
    step_host_seconds: float = 0.0  # seconds that the engine itself needs: planning and committing steps
    step_seconds: float = 0.0  # seconds of all steps, including the backend's work
    step_age: float = 0.0  # seconds since the current step began, 0 between steps; a hung step shows here
