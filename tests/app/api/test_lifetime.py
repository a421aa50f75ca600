"""Durations of `keep_alive` and `ttl`."""

from __future__ import annotations

import math

import pytest

from localllm.app.api.lifetime import seconds
from localllm.app.errors import InvalidRequest


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0.0),
        (30, 30.0),
        (1.5, 1.5),
        (-1, math.inf),
        ("0", 0.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("300ms", 0.3),
        ("-1s", math.inf),
        ("10s", 10.0),
    ],
)
def test_durations(value: float | str, expected: float) -> None:
    assert seconds(value, "keep_alive") == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "5", "m", "5 m", "5x", "--1s", "1e9s", "9" * 13 + "s", "5m "])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        seconds(text, "ttl")
    assert refused.value.param == "ttl"
