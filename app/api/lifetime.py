"""The time that a model stays loaded after a request: `keep_alive` of Ollama, `ttl` of LM Studio."""

from __future__ import annotations

import math
import re

from ..errors import InvalidRequest

_PART = r"([0-9]{1,12}(?:\.[0-9]{1,9})?)(h|ms|m|s|us|µs|ns)"
_DURATION = re.compile(rf"(-?)((?:{_PART})+|0)")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def seconds(value: float | str, param: str) -> float:
    """The seconds of a duration: a number of seconds, or a text such as `5m` or `1h30m`. A negative one is infinite.

    Raises InvalidRequest for another text.
    """
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        if match is None:
            raise InvalidRequest(f"{param}: {value[:40]!r} is no duration such as 5m or 1h30m", param=param)
        value = sum(float(number) * _SECONDS[unit] for number, unit in re.findall(_PART, match[2]))
        value = -value if match[1] else value
    return math.inf if value < 0 else float(value)
