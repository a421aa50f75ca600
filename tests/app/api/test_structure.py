"""The count of values in a JSON text."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from localllm.app.api import structure
from localllm.app.api.structure import MAX_CONTAINERS, MAX_VALUES, check_structure
from localllm.app.errors import InvalidRequest


@pytest.mark.parametrize(
    ("item", "limit"),
    [
        (b"[]", MAX_CONTAINERS),
        (b"{}", MAX_CONTAINERS),
        (b'{"a":1}', MAX_CONTAINERS // 2),
        (b"1", MAX_VALUES),
        (b'"a"', MAX_VALUES),
        (b'""', MAX_VALUES),
        (b'"[{:,"', MAX_VALUES),
        (b'"\\"[{:,\\\\"', MAX_VALUES),
    ],
)
def test_limits(item: bytes, limit: int) -> None:
    check_structure(b"[" + b",".join([item] * (limit - 1)) + b"]")
    with pytest.raises(InvalidRequest, match="the body has more than") as refused:
        check_structure(b"[" + b",".join([item] * (limit + 2)) + b"]")
    assert refused.value.hint


@pytest.mark.parametrize("text", ["{[:," * 300_000, '\\"[' * 200_000, "\\" * 99_999 + '[{"' * 100_000])
def test_characters_of_strings_do_not_count(text: str) -> None:
    check_structure(json.dumps({"prompt": text}).encode())


def count(value: Any) -> int:
    """Containers and members of a JSON value."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(count, value.values()))
    return 1 + sum(map(count, value)) if isinstance(value, list) else 0


@pytest.mark.parametrize("seed", range(60))
def test_count_equals_that_of_the_decoded_value(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(seed)
    monkeypatch.setattr(structure, "_STEP", generator.randint(1, 9))

    def value(depth: int) -> Any:
        kind = generator.randrange(6) if depth else 5
        if kind == 0:
            return {text(): value(depth - 1) for _ in range(generator.randrange(4))}
        if kind <= 2:
            return [value(depth - 1) for _ in range(generator.randrange(4))]
        return text()

    def text() -> str:
        return "".join(generator.choices('\\"[{:,a\né', k=generator.randrange(8)))

    made = [value(5) for _ in range(4)]
    body = json.dumps(made, ensure_ascii=bool(seed % 2)).encode()
    monkeypatch.setattr(structure, "MAX_CONTAINERS", count(made))
    check_structure(body)
    monkeypatch.setattr(structure, "MAX_CONTAINERS", count(made) - 1)
    with pytest.raises(InvalidRequest):
        check_structure(body)
