"""The metrics of an answer and of the workers."""

from __future__ import annotations

import pytest

from localllm.app.api import metrics
from localllm.app.api.metrics import Metrics
from localllm.app.frames import Piece, Stats


def test_watch_measures_times_between_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two choices: one time to the first piece; then the time between the pieces of a choice, divided by the tokens."""
    clock = iter([10.0, 12.0, 13.0, 17.0, 40.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    made = Metrics()
    watch = made.watch("m")
    assert watch.decode_seconds == 0
    watch.pieces([Piece(id="a", tokens=1)])
    watch.pieces([Piece(id="a", choice=1, tokens=1)])
    watch.pieces([Piece(id="a", tokens=2)])
    watch.pieces([Piece(id="a"), Piece(id="a", choice=1, text="held back")])
    assert watch.decode_seconds == 5.0
    watch.tokens(7, 4)
    page = made.render({}, {}).decode()
    for line in (
        'time_to_first_token_seconds_count{model="m"} 1.0',
        'time_to_first_token_seconds_sum{model="m"} 2.0',
        'inter_token_seconds_count{model="m"} 1.0',
        'inter_token_seconds_sum{model="m"} 2.5',
        'prompt_tokens_total{model="m"} 7.0',
        'generated_tokens_total{model="m"} 4.0',
    ):
        assert f"localllm_{line}\n" in page, line


def test_worker_statistics_have_their_own_metrics() -> None:
    figures = {name: float(number) for number, name in enumerate([*metrics._GAUGES, *metrics._COUNTERS], 1)}
    page = Metrics().render({"m": Stats(id="a", **figures)}, {"n": 3}).decode()
    for name, value in figures.items():
        end = "_total" if name in metrics._COUNTERS else ""
        assert f'localllm_{name}{end}{{model="m"}} {value}\n' in page, name
    assert 'localllm_worker_restarts_total{model="n"} 3.0\n' in page
