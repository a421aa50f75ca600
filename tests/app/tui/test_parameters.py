"""Sampling parameters: every error names the parameter and its range."""

from __future__ import annotations

import pytest

from localllm.app.errors import InvalidRequest
from localllm.app.tui.parameters import PARAMETERS, check, format_value, parameter, parse


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.7", 0.7),
        ("temperature", "0", 0.0),
        ("Top-P", "1", 1.0),
        ("top_k", "40", 40),
        ("min_p", ".05", 0.05),
        ("max_tokens", "128", 128),
        ("seed", "18446744073709551615", 2**64 - 1),
        ("stop", "END", ["END"]),
        ("stop", '["a", "b"]', ["a", "b"]),
        ("presence_penalty", "-2", -2.0),
        ("repetition_penalty", "1.1", 1.1),
        ("adapter", "pirate", "pirate"),
        ("adapter", "pirate=0.5", "pirate=0.5"),
        ("adapter", "none", None),
        ("temperature", "", None),
        ("seed", "none", None),
    ],
)
def test_parse_converts_typed_text(name: str, text: str, value: object) -> None:
    assert parse(name, text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("temperature", "hot"),
        ("temperature", "nan"),
        ("top_k", "1.5"),
        ("stop", "[1]"),
        ("stop", '["a", ""]'),
        ("stop", "[broken"),
        ("adapter", "pirate=much"),
        ("adapter", "pirate=101"),
        ("adapter", "=1"),
    ],
)
def test_parse_rejects_values_out_of_range(name: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as refused:
        parse(name, text)
    assert PARAMETERS[name].range in str(refused.value)


def test_unknown_parameter_gets_similar_names_as_hint() -> None:
    with pytest.raises(InvalidRequest, match="temprature") as refused:
        parse("temprature", "1")
    assert "temperature" in refused.value.hint


@pytest.mark.parametrize(
    ("name", "good", "bad", "range_text"),
    [
        ("temperature", [0, 2], [-0.01, 2.01], "a number from 0 to 2"),
        ("top_p", [0.001, 1], [0, 1.001], "a number above 0 and up to 1"),
        ("top_k", [0, 2**31 - 1], [-1, 1.5, 2**31, float("inf")], "an integer from 0 to 2^31 - 1"),
        ("min_p", [0, 1], [-0.01, 1.01], "a number from 0 to 1"),
        ("max_tokens", [1, 2**53 - 1], [0, 2**53], "an integer from 1 to 2^53 - 1"),
        ("seed", [0, 2**64 - 1], [-1, 2**64], "an integer from 0 to 2^64 - 1"),
        ("presence_penalty", [-2, 2], [-2.01, 2.01], "a number from -2 to 2"),
        ("frequency_penalty", [-2, 2], [-2.01, 2.01], "a number from -2 to 2"),
        ("repetition_penalty", [0.01, 100], [0, 100.01], "a number above 0 and up to 100"),
    ],
)
def test_check_accepts_exactly_the_range(name: str, good: list[float], bad: list[float], range_text: str) -> None:
    for value in good:
        assert check(name, value) == value
        assert type(check(name, value)) is PARAMETERS[name].kind
        assert parse(name, format_value(value)) == value
    for value in [*bad, float("nan"), "x", [0.5], None, True]:
        with pytest.raises(InvalidRequest) as refused:
            check(name, value)
        assert range_text in refused.value.message
        assert (refused.value.param, refused.value.hint) == (name, PARAMETERS[name].sentence)


def test_stop_texts() -> None:
    assert check("stop", "END") == ["END"]
    assert check("stop", ("a", "b")) == ["a", "b"]
    for value in ([""], [1], 3, None, ""):
        with pytest.raises(InvalidRequest, match="a text, or a JSON list"):
            check("stop", value)
    assert parse("stop", "[]") is None
    for unset in ("", "None", "default", "UNSET"):
        assert parse("stop", unset) is None
    assert (format_value(["["]), format_value(["a", "é"]), format_value(["a"]), format_value(0.5), format_value(7)) == (
        '["["]',
        '["a", "é"]',
        "a",
        "0.5",
        "7",
    )
    assert parameter(" Top-P ").name == "top_p"
    with pytest.raises(InvalidRequest) as refused:
        parameter("zzz")
    assert all(name in refused.value.hint for name in PARAMETERS)
