"""The Prometheus metrics of /metrics."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ..frames import Piece, Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
BETWEEN_TOKENS_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)

_GAUGES = {
    "running": "Requests being computed",
    "waiting": "Requests waiting",
    "cache_tokens": "Capacity of the KV cache in tokens",
    "cache_used": "Tokens in the KV cache",
}
_COUNTERS = {
    "steps": "Steps computed",
    "prefix_hit_tokens": "Prompt tokens from the prefix cache",
    "preemptions": "Preemptions: requests that lost their KV memory and were computed again",
    "late_compiles": "Compilations during steps, while requests waited",
    "step_seconds": "Seconds spent in steps",
    "step_host_seconds": "Seconds of the steps spent in the scheduler",
}


class Metrics:
    """The counters of the daemon. Their only labels are ids of loaded models and outcomes of requests."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "localllm_requests", "Generation requests by outcome", ["model", "status"], registry=self._registry
        )
        self._tokens_in = Counter("localllm_prompt_tokens", "Tokens in prompts", ["model"], registry=self._registry)
        self._tokens_out = Counter("localllm_generated_tokens", "Tokens made", ["model"], registry=self._registry)
        self._first = Histogram(
            "localllm_time_to_first_token_seconds",
            "Seconds from the arrival of a request to its first token",
            ["model"],
            buckets=FIRST_TOKEN_SECONDS,
            registry=self._registry,
        )
        self._between = _Intervals()
        self._registry.register(self._between)

    def watch(self, model: str) -> Watch:
        """A Watch for a request that arrives now."""
        return Watch(
            first=self._first.labels(model),
            between=self._between.of(model),
            tokens_in=self._tokens_in.labels(model),
            tokens_out=self._tokens_out.labels(model),
        )

    def render(self, stats: Mapping[str, Stats], deaths: Mapping[str, int]) -> bytes:
        """The text of /metrics: counters of the daemon, statistics of the workers, count of unexpected worker exits."""
        workers = CollectorRegistry()
        workers.register(_Snapshot(stats, deaths))
        return generate_latest(self._registry) + generate_latest(workers)


class Watch:
    """Measures the times between the pieces of one request, and counts its tokens."""

    def __init__(self, *, first: Histogram, between: _Counts, tokens_in: Counter, tokens_out: Counter) -> None:
        self._first = first
        self._between = between
        self._tokens_in = tokens_in
        self._tokens_out = tokens_out
        self._arrived = time.perf_counter()
        self._choices: dict[tuple[str, int], float] = {}  # (frame id, choice) → time of its last piece
        self._first_time = 0.0  # time of the first piece

    def pieces(self, pieces: Iterable[Piece]) -> None:
        now = time.perf_counter()
        for piece in pieces:
            if not piece.tokens:
                continue
            key = (piece.id, piece.choice)
            previous = self._choices.get(key)
            if previous is not None:
                self._between.add((now - previous) / piece.tokens)
            elif not self._choices:
                self._first.observe(now - self._arrived)
                self._first_time = now
            self._choices[key] = now

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first piece to the last one so far."""
        return max(self._choices.values(), default=0.0) - self._first_time

    def tokens(self, prompt: int, generated: int) -> None:
        self._tokens_in.inc(prompt)
        self._tokens_out.inc(generated)


class _Counts:
    """The intervals of one model, counted in buckets."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BETWEEN_TOKENS_SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BETWEEN_TOKENS_SECONDS, seconds)] += 1
        self._sum += seconds

    def report(self) -> tuple[list[tuple[str, float]], float]:
        """The cumulative counts with their upper bounds, and the sum in seconds."""
        bounds = [*map(str, BETWEEN_TOKENS_SECONDS), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True)), self._sum


class _Intervals:
    """The histogram of the seconds between tokens. One of the library costs more for a token than the token's event."""

    def __init__(self) -> None:
        self._models: dict[str, _Counts] = {}

    def of(self, model: str) -> _Counts:
        return self._models.setdefault(model, _Counts())

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "localllm_inter_token_seconds", "Seconds between tokens of a request", labels=["model"]
        )
        for model, counts in self._models.items():
            family.add_metric([model], *counts.report())
        yield family


class _Snapshot:
    """Converts the current statistics of the workers to metrics."""

    def __init__(self, stats: Mapping[str, Stats], deaths: Mapping[str, int]) -> None:
        self._stats = stats
        self._deaths = deaths

    def collect(self) -> Iterator[Metric]:
        for name, description in _GAUGES.items():
            yield self._add(GaugeMetricFamily(f"localllm_{name}", description, labels=["model"]), name)
        for name, description in _COUNTERS.items():
            yield self._add(CounterMetricFamily(f"localllm_{name}", description, labels=["model"]), name)
        deaths = CounterMetricFamily(
            "localllm_worker_restarts", "Worker processes that ended unexpectedly", labels=["model"]
        )
        for model, count in self._deaths.items():
            deaths.add_metric([model], count)
        yield deaths

    def _add(self, family: GaugeMetricFamily | CounterMetricFamily, name: str) -> Metric:
        """Add to `family` the statistic `name` of every model."""
        for model, stats in self._stats.items():
            family.add_metric([model], getattr(stats, name))
        return family
