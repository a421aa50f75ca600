"""Sampling parameters: names, ranges, descriptions, and the parser of typed values."""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequest


@dataclass(frozen=True)
class Parameter:
    """One sampling parameter. Its value is > `above`, >= `low` and <= `high`."""

    name: str
    kind: type[int] | type[float] | type[list[str]]
    sentence: str
    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf

    @property
    def range(self) -> str:
        if self.kind is list:
            return 'a text, or a JSON list such as ["END", "\\n\\n"]'
        left = f"more than {self.above:g}" if self.above > -math.inf else f"{self.low:g}"
        number = "an integer" if self.kind is int else "a number"
        if self.high == math.inf:
            return f"{number}, {left}" + (" or more" if self.above == -math.inf else "")
        if self.high >= 2**63:
            return f"{number}, {left} to 2^64 - 1"
        return f"{number}, {left} to {self.high:g}"


PARAMETERS = {
    parameter.name: parameter
    for parameter in (
        Parameter("temperature", float, "Randomness; 0: always the most likely token.", 0, 100),
        Parameter("top_p", float, "Sample from the most likely tokens with this total probability.", 0, 1, above=0),
        Parameter("top_k", int, "Sample from this many most likely tokens; 0: no limit.", 0),
        Parameter("min_p", float, "Exclude tokens below this fraction of the highest probability.", 0, 1),
        Parameter("max_tokens", int, "Maximum length of the answer in tokens; unset: the rest of the context.", 1),
        Parameter("seed", int, "Random seed; the same seed gives the same answer.", 0, 2**64 - 1),
        Parameter("stop", list, "End the answer before any of these texts."),
        Parameter("presence_penalty", float, "Above 0: tokens that were used are less likely.", -2, 2),
        Parameter("frequency_penalty", float, "Above 0: tokens that were used often are less likely.", -2, 2),
        Parameter(
            "repetition_penalty",
            float,
            "Above 1: tokens of the prompt and the answer are less likely.",
            0,
            100,
            above=0,
        ),
    )
}


def parameter(name: str) -> Parameter:
    """The parameter of this name. Raises InvalidRequest with similar names."""
    known = PARAMETERS.get(name.strip().lower().replace("-", "_"))
    if known is None:
        near = difflib.get_close_matches(name, PARAMETERS, n=3) or list(PARAMETERS)
        raise InvalidRequest(f"Unknown parameter {name!r}.", hint=f"Try {', '.join(near)}.", param=name)
    return known


def parse(name: str, text: str) -> Any:
    """The value of a typed text; None for an empty text (unset). Raises InvalidRequest."""
    known = parameter(name)
    text = text.strip()
    if not text or text.lower() in ("none", "default", "unset"):
        return None
    if known.kind is list:
        return _stops(known, text)
    try:
        value = known.kind(text)
    except ValueError:
        raise _refusal(known, text) from None
    return check(known.name, value)


def check(name: str, value: Any) -> Any:
    """Validate a value. Raises InvalidRequest."""
    known = parameter(name)
    if known.kind is list:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
            raise _refusal(known, value)
        return list(texts)
    if isinstance(value, bool) or not isinstance(value, int | float) or (known.kind is int and value != int(value)):
        raise _refusal(known, value)
    if not (known.low <= value <= known.high and value > known.above and math.isfinite(value)):
        raise _refusal(known, value)
    return int(value) if known.kind is int else float(value)


def format_value(value: Any) -> str:
    """A value as text, in the form that `parse` accepts."""
    if isinstance(value, list):
        return value[0] if len(value) == 1 and value[0][:1] != "[" else json.dumps(value, ensure_ascii=False)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _stops(known: Parameter, text: str) -> list[str] | None:
    if not text.startswith("["):
        return [text]
    try:
        value = json.loads(text)
    except ValueError:
        raise _refusal(known, text) from None
    return check(known.name, value) or None


def _refusal(known: Parameter, value: object) -> InvalidRequest:
    return InvalidRequest(
        f"{known.name} must be {known.range}, not {str(value)[:40]!r}.", hint=known.sentence, param=known.name
    )
