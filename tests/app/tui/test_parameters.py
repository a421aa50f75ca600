"""Sampling parameters: every error names the parameter and its range."""

from __future__ import annotations

import pytest

from localllm.app.errors import InvalidRequest
from localllm.app.tui.parameters import PARAMETERS, check, format_value, parse


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
        ("temperature", "-0.1"),
        ("temperature", "hot"),
        ("temperature", "nan"),
        ("temperature", "inf"),
        ("top_p", "0"),
        ("top_p", "1.01"),
        ("top_k", "1.5"),
        ("top_k", "-1"),
        ("max_tokens", "0"),
        ("seed", "18446744073709551616"),
        ("seed", "-1"),
        ("stop", "[1]"),
        ("stop", '["a", ""]'),
        ("stop", "[broken"),
        ("frequency_penalty", "2.5"),
        ("repetition_penalty", "0"),
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


@pytest.mark.parametrize("value", [True, "0.5", [0.5], float("nan"), 101])
def test_check_rejects_invalid_temperatures(value: object) -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        check("temperature", value)


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.7), ("seed", 7), ("stop", ["["]), ("stop", ["a", "b"])])
def test_format_value_is_parsed_back(name: str, value: object) -> None:
    assert parse(name, format_value(value)) == value
