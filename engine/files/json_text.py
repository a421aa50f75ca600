"""Parses JSON of untrusted files within bounds of time and memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

Pairs = list[tuple[str, Any]]

# Mark -> maximum number in a text, strings included. Python needs up to 200 bytes for each value of a JSON text, so the
# size of the text is not a sufficient bound. 131,072 tensors of one safetensors file fit.
MAX_MARKS = MappingProxyType({b"{": 2**18, b"[": 2**18, b",": 12 * 2**17})


def parse(raw: bytes, make_object: Callable[[Pairs], object] | None = None) -> Any:
    """The value of a JSON text in UTF-8. Raises ValueError; its message completes "the text is …".

    `make_object` makes an object of its pairs of name and value; None: a dict.
    """
    for mark, limit in MAX_MARKS.items():
        if raw.count(mark) > limit:
            raise ValueError(f"too complex: it has {mark.decode()!r} more than {limit} times")
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=make_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
