"""Bodies of other protocols with wrong values at every place: each is accepted, or an error of the client."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from localllm.app.api.anthropic.body import MESSAGES
from localllm.app.api.body import decode
from localllm.app.api.responses.routes import ResponseRoutes
from localllm.app.api.responses.stored import ResponseStore
from localllm.app.errors import AppError

FUNCTION = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
RESPONSE: dict[str, Any] = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "localllm:YQ=="},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
    ],
    "tools": [FUNCTION, {"type": "web_search"}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}, "verbosity": "low"},
    "reasoning": {"effort": "low"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
}
MESSAGE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "a", "signature": "b"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "2"}]},
    ],
    "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 2000},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    "stop_sequences": ["x"],
}
REFERENCE = {"type": "item_reference", "id": f"msg_{'0' * 32}_1"}
WEIRD: list[Any] = [None, True, -1, 2**31, 2**64, 1e308, "", "\0", "text", "a" * 3000, [], {}, [[]], [None], {"": 0}]
WEIRD += [{"type": None}, {"type": "message"}, REFERENCE, {"role": "user"}, [{"type": "text", "text": 1}]]


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in items:
        yield (*path, name)
        yield from paths(child, (*path, name))


def mutated(body: dict[str, Any], random: Random) -> dict[str, Any]:
    body = copy.deepcopy(body)
    *parents, name = random.choice(list(paths(body)))
    target: Any = body
    for parent in parents:
        target = target[parent]
    if random.random() < 0.2:
        del target[name]
    elif random.random() < 0.2 and isinstance(target, list):
        target.append(copy.deepcopy(target[name]))
    else:
        target[name] = random.choice(WEIRD)
    return body


@pytest.mark.parametrize("valid", [RESPONSE, MESSAGE])
def test_a_wrong_body_is_an_error_of_the_client(tmp_path: Path, valid: dict[str, Any]) -> None:
    responses = ResponseRoutes(None, 0, ResponseStore(tmp_path / "none")).protocol  # type: ignore[arg-type]
    protocol: Any = responses if valid is RESPONSE else MESSAGES
    assert protocol.ask(decode(json.dumps(valid).encode(), protocol.body)).requests
    random = Random(0)
    errors: list[tuple[AppError, Any]] = []
    for _ in range(500):
        body = mutated(valid, random)
        try:
            protocol.ask(decode(json.dumps(body).encode(), protocol.body))
        except AppError as error:
            errors.append((error, body))
    assert len(errors) > 100
    assert all(error.status == 400 and error.message for error, _ in errors), errors
