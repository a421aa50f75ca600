"""The policy for fields without effect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localllm.app.api import ignored, openapi
from localllm.app.api.body import decode
from localllm.app.api.embeddings import EmbeddingBody
from localllm.app.api.ignored import IGNORED, Policy, ignored_in
from localllm.app.api.openai import ChatBody, CompletionBody
from localllm.app.errors import UnsupportedParameter

HI = [{"role": "user", "content": "hi"}]
PART = {"type": "text", "text": "x"}
CONTROL = {"cache_control": {"type": "ephemeral"}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
# A value of each field of a chat that asks for something; fields of other routes are in their tests.
VALUES: dict[str, dict[str, Any]] = {
    "cache_prompt": {"cache_prompt": False},
    "dry_allowed_length": {"dry_allowed_length": 2},
    "dry_base": {"dry_base": 1.75},
    "dry_penalty_last_n": {"dry_penalty_last_n": -1},
    "dry_sequence_breakers": {"dry_sequence_breakers": ["\n"]},
    "dynatemp_exponent": {"dynatemp_exponent": 1.0},
    "id_slot": {"id_slot": 3},
    "messages.cache_control": {"messages": [HI[0] | CONTROL]},
    "messages.content.cache_control": {"messages": [{"role": "user", "content": [PART, PART | CONTROL]}]},
    "messages.content.prompt_cache_breakpoint": {
        "messages": [{"role": "user", "content": [PART | {"prompt_cache_breakpoint": {}}]}]
    },
    "metadata": {"metadata": {"a": "b"}},
    "mirostat_eta": {"mirostat_eta": 0.1},
    "mirostat_tau": {"mirostat_tau": 5.0},
    "priority": {"priority": 1},
    "prompt_cache_key": {"prompt_cache_key": "k"},
    "prompt_cache_options": {"prompt_cache_options": {}},
    "prompt_cache_retention": {"prompt_cache_retention": "24h"},
    "safety_identifier": {"safety_identifier": "s"},
    "service_tier": {"service_tier": "flex"},
    "store": {"store": True},
    "stream_options.include_obfuscation": {"stream": True, "stream_options": {"include_obfuscation": True}},
    "tools.cache_control": {"tools": [TOOL, TOOL | {"function": {"name": "g"}} | CONTROL]},
    "user": {"user": "u"},
    "xtc_threshold": {"xtc_threshold": 0.1},
}


def chat(**fields: Any) -> ChatBody:
    body = decode(json.dumps({"messages": HI} | fields).encode(), ChatBody)
    body.frames("id")
    return body


@pytest.mark.parametrize("name", VALUES)
def test_field_is_accepted_and_named(name: str) -> None:
    assert ignored_in(chat(**VALUES[name])) == (name,)
    assert ignored_in(chat()) == ()


@pytest.mark.parametrize("name", [name for name in VALUES if IGNORED[name].neutral])
def test_neutral_values_are_not_named(name: str) -> None:
    *outer, last = name.split(".")
    for value in IGNORED[name].neutral:
        fields: dict[str, Any] = {last: value}
        for part in reversed(outer):
            fields = {part: fields}
        assert ignored_in(chat(stream=True, **fields)) == ()


def test_policy_is_the_same_on_other_routes() -> None:
    assert ignored_in(decode(b'{"prompt": "x", "user": "u", "store": true}', CompletionBody)) == ("store", "user")
    assert ignored_in(decode(b'{"input": "x", "user": "u"}', EmbeddingBody)) == ("user",)


def test_names_are_in_the_header_or_refused() -> None:
    policy = Policy(strict=False)
    assert policy.headers == {}
    policy.add(["user"])
    policy.add(["store"])
    assert policy.headers == {"x-localllm-ignored": "user, store"}
    with pytest.raises(UnsupportedParameter) as refused:
        Policy(strict=True).add(["store"])
    assert refused.value.param == "store"
    assert IGNORED["store"].reason in refused.value.message
    with pytest.raises(UnsupportedParameter):
        Policy(strict=True).add(["chat_template_kwargs.thinking"])
    Policy(strict=True).add([])


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"reasoning_effort": "low"}, ["reasoning_effort"]),
        ({"enable_thinking": True}, ["enable_thinking"]),
        ({"reasoning": {"effort": "low"}}, ["reasoning"]),
    ],
)
def test_names_of_the_worker_become_those_of_the_client(fields: dict[str, Any], names: list[str]) -> None:
    body = chat(**fields)
    assert body.ignored_by_template(["reasoning"]) == names
    assert body.ignored_by_template(["verbosity", "thinking"]) == ["verbosity", "chat_template_kwargs.thinking"]


def test_the_table_has_every_field_and_is_in_the_openapi_document() -> None:
    table = ignored.table()
    assert IGNORED.keys() | ignored.BY_TEMPLATE.keys() == table.keys()
    assert all(reason.endswith(".") for reason in table.values())
    document = openapi.describe("1")
    assert document["x-localllm-ignored"] == table
    headers = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["headers"]
    assert headers.keys() == {ignored.HEADER}
