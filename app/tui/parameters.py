"""Sampling parameters of a conversation: their ranges, their sentences and how typed text becomes a value."""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequest


@dataclass(frozen=True)
class Parameter:
    """One field of the chat request. `above` and `low` bound from below (exclusive, inclusive), `high` from above."""

    name: str
    kind: type[int] | type[float] | type[list]
    sentence: str
    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf

    @property
    def range(self) -> str:
        if self.kind is list:
            return 'one text, or a JSON list such as ["END", "\\n\\n"]'
        left = f"more than {self.above:g}" if self.above > -math.inf else f"{self.low:g}"
        number = "a whole number" if self.kind is int else "a number"
        if self.high == math.inf:
            return f"{number}, {left}" + (" or more" if self.above == -math.inf else "")
        if self.high >= 2**63:
            return f"{number}, {left} to 2^64 - 1"
        return f"{number}, {left} to {self.high:g}"


PARAMETERS = {
    parameter.name: parameter
    for parameter in (
        Parameter("temperature", float, "How freely words are drawn; 0 always takes the likeliest.", 0, 100),
        Parameter("top_p", float, "Draw from the likeliest words that together have this probability.", 0, 1, above=0),
        Parameter("top_k", int, "Draw from this many likeliest words; 0 is off.", 0),
        Parameter("min_p", float, "Leave out words less likely than this part of the likeliest.", 0, 1),
        Parameter("max_tokens", int, "Longest answer in tokens; unset uses what the context has left.", 1),
        Parameter("seed", int, "The same seed and conversation give the same answer.", 0, 2**64 - 1),
        Parameter("stop", list, "The answer ends before any of these texts."),
        Parameter("presence_penalty", float, "Above 0: words already used become less likely.", -2, 2),
        Parameter("frequency_penalty", float, "Above 0: often used words become less likely.", -2, 2),
        Parameter("repetition_penalty", float, "Above 1: words of prompt and answer repeat less.", 0, 100, above=0),
    )
}


def parameter(name: str) -> Parameter:
    """The parameter of this name. Raises InvalidRequest that names near matches."""
    found = PARAMETERS.get(name.strip().lower().replace("-", "_"))
    if found is None:
        near = difflib.get_close_matches(name, PARAMETERS, n=3) or list(PARAMETERS)
        raise InvalidRequest(f"There is no parameter {name!r}.", hint=f"Try {', '.join(near)}.", param=name)
    return found


def parse(name: str, text: str) -> Any:
    """The value that `text` gives the parameter; None for empty text, which unsets it. Raises InvalidRequest."""
    known, text = parameter(name), text.strip()
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
    """The value itself when it fits the parameter. Raises InvalidRequest."""
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


def shown(value: Any) -> str:
    """A value as text that `parse` reads back."""
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
        f"{known.name} cannot be {str(value)[:40]!r}: it is {known.range}.", hint=known.sentence, param=known.name
    )
