"""Tool calls over HTTP: a real worker runs a model that writes a known text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.app.chat.calls.records import FORMATS
from localllm.app.chat.calls.writing import example
from localllm.app.daemon.process import COMMAND

from ..chat.template.call_templates import template_of
from ..script_model import Markers, write_script_model
from .conftest import Daemon, events

HERMES = FORMATS[0]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
OSLO = ("get_weather", {"city": "Tromsø 🙂", "days": 30})
ROME = ("get_weather", {"city": "Rome", "days": 3})
WRONG = ("get_wether", {"city": "Rome", "days": "many"})
SCRIPTS = {
    "one": example(HERMES, [OSLO]),
    "two": f"I will look.\n{example(HERMES, [OSLO, ROME])}",
    "wrong": example(HERMES, [WRONG]),
    "text": "No <b>tool</b> is needed.",
}
Answer = tuple[str, str, list[tuple[str, str]]]  # text, finish reason, calls


@pytest.fixture(scope="module")
def client(short_folder: Callable[[], Path]) -> Iterator[httpx.Client]:
    folder = short_folder()
    repo = folder / "hub/models--test--script"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0123456789abcdef")
    markers = Markers(("<tool_call>", "</tool_call>"))
    snapshot = repo / "snapshots" / "0123456789abcdef"
    write_script_model(snapshot, SCRIPTS, template_of(HERMES), markers=markers, preferred=['"', "}"])
    env = {"TEST_WORKER": json.dumps(COMMAND), "OMP_NUM_THREADS": "1"}
    daemon = Daemon(folder, env=env, backend="cpu", dtype="float32", cache_mib=16, max_rows=8, threads=1)
    assert daemon.url
    with daemon.local() as local:
        local.timeout = httpx.Timeout(100)
        yield local
    assert daemon.stop() == 0, daemon.log
    assert "Traceback" not in daemon.log, daemon.log


def body(script: str, **more: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
    messages = [{"role": "user", "content": script}]
    options = {"temperature": 0, "max_tokens": 200, "tools": [tool]} | more
    return {"model": "test/script", "messages": messages} | options


def whole(client: httpx.Client, script: str, **more: Any) -> Answer:
    response = client.post("/v1/chat/completions", json=body(script, **more))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    calls = choice["message"].get("tool_calls") or []
    assert len({call["id"] for call in calls}) == len(calls)
    functions = [call["function"] for call in calls]
    text = choice["message"]["content"] or ""
    return text, choice["finish_reason"], [(call["name"], call["arguments"]) for call in functions]


def streamed(client: httpx.Client, script: str, **more: Any) -> Answer:
    response = client.post("/v1/chat/completions", json=body(script, stream=True, **more))
    choices = [event["choices"][0] for event in events(response.text) if event["choices"]]
    calls: dict[int, list[str]] = {}
    for part in (part for choice in choices for part in choice["delta"].get("tool_calls") or []):
        name = part["function"].get("name")
        if part["index"] not in calls:
            assert name
            assert part["id"]
            calls[part["index"]] = [name, ""]
        else:
            assert not name
        calls[part["index"]][1] += part["function"].get("arguments") or ""
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, choices[-1]["finish_reason"], [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize("script", ["one", "two", "text"])
def test_answer_is_the_script_streamed_or_not(client: httpx.Client, script: str) -> None:
    text = {"one": "", "two": "I will look.", "text": SCRIPTS["text"]}[script]
    calls = {"one": [OSLO], "two": [OSLO, ROME], "text": []}[script]
    answer = whole(client, script)
    assert answer[:2] == (text, "tool_calls" if calls else "stop")
    assert [(name, json.loads(arguments)) for name, arguments in answer[2]] == calls
    assert streamed(client, script) == answer


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_call_is_valid_streamed_or_not(client: httpx.Client, choice: Any) -> None:
    for script in ("one", "wrong", "text"):
        answer = whole(client, script, tool_choice=choice, parallel_tool_calls=False)
        text, finish, ((name, arguments),) = answer
        assert (text, finish, name) == ("", "tool_calls", "get_weather")
        assert json.loads(arguments).keys() == {"city", "days"}
        assert isinstance(json.loads(arguments)["days"], int)
        assert streamed(client, script, tool_choice=choice, parallel_tool_calls=False) == answer


def test_cut_call_is_the_same_streamed_or_not(client: httpx.Client) -> None:
    full = whole(client, "one")[2]
    for limit in range(1, 16):
        answer = whole(client, "one", max_tokens=limit)
        assert answer[:2] == ("", "length")
        assert streamed(client, "one", max_tokens=limit) == answer
        assert all(full[0][1].startswith(arguments.rstrip("\ufffd")) for _, arguments in answer[2])
