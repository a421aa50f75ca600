"""Every option of a request with adapters: the answers of an adapter are those of the base model to another prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ...backends import canary
from .canary_api import LONG, PROMPT, SHIFTS, Api, answer, request_body, serve, text_of

# A key in the answer would act as another key under an adapter, so no key is drawn.
NO_KEYS = {str(canary.SYMBOLS + key): -100 for key in range(canary.KEYS)}
DRAWN = {"temperature": 2.0, "seed": 11, "logit_bias": NO_KEYS}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 6}, "e": {"enum": ["m", "gs", "name"]}},
    "required": ["a", "e"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def loaded(short_folder: Callable[[], Path]) -> Iterator[Api]:
    """A daemon with the adapters of SHIFTS."""
    for api in serve(short_folder()):
        for name in filter(None, SHIFTS):
            api.load(name, SHIFTS[name])
        yield api


def choices(api: Api, body: dict[str, Any]) -> list[dict[str, Any]]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = api.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def check_against_base(api: Api, body: dict[str, Any], prompt: list[int] = PROMPT) -> dict[str, list[dict[str, Any]]]:
    """Send a request to the base model and to all adapters at once, and return the choices.

    An adapter must give the answers of the base model to the prompt with the key that the adapter puts in its place.
    """

    def ask(name: str) -> list[dict[str, Any]]:
        return choices(api, request_body(name) | {"prompt": prompt} | body)

    with ThreadPoolExecutor(len(SHIFTS)) as pool:
        answers = dict(zip(SHIFTS, pool.map(ask, SHIFTS), strict=True))
    for name, shift in SHIFTS.items():
        expected = choices(api, request_body("") | {"prompt": canary.under(prompt, shift)} | body)
        assert answers[name] == [approximately(choice) for choice in expected], name
    return answers


def approximately(value: Any) -> Any:
    """The value, with all numbers compared by a tolerance."""
    match value:
        case dict():
            return {key: approximately(item) for key, item in value.items()}
        case list():
            return [approximately(item) for item in value]
        case float():
            return pytest.approx(value, abs=1e-4)
    return value


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 3} | DRAWN,
        {"logprobs": 1},
        {"logprobs": 5, "n": 2} | DRAWN,
        {"presence_penalty": 2.0, "frequency_penalty": 2.0} | DRAWN,
        {"repetition_penalty": 1.9} | DRAWN,
        {"top_k": 4, "top_p": 0.9, "min_p": 0.01} | DRAWN | {"logit_bias": NO_KEYS | {"3": 7.0, "9": -100}},
        {"stop": ["s", "}"]},
        {"stop_token_ids": [11, 15], "n": 2} | DRAWN,
        {"regex": "[names]{12}"} | DRAWN,
        {"choice": [first + second for first in "namergut" for second in "namergut"], "n": 6} | DRAWN,
    ],
    ids=lambda options: next(iter(options), "greedy"),
)
def test_option_of_a_completion_with_an_adapter(loaded: Api, options: dict[str, Any]) -> None:
    answers = check_against_base(loaded, options)
    texts = {name: [choice["text"] for choice in entry] for name, entry in answers.items()}
    assert len({tuple(entry) for entry in texts.values()}) == len(SHIFTS), texts


def test_json_schema_with_adapters(loaded: Api) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    answers = check_against_base(loaded, {"response_format": response_format, "max_tokens": 200, "n": 3} | DRAWN)
    objects = {choice["text"] for entry in answers.values() for choice in entry}
    assert len(objects) > len(SHIFTS)
    for text in objects:
        value = json.loads(text)
        assert len(value["a"]) <= 6
        assert value["e"] in {"m", "gs", "name"}


def test_tool_calls_of_adapters_beside_each_other(loaded: Api) -> None:
    """Each adapter makes the calls that it makes alone. It prefers one of the letters with which names can begin."""
    letters = [*"namergut"]
    parameters = {"type": "object", "properties": {"a": {"enum": letters}}, "required": ["a"]}
    parameters["additionalProperties"] = False
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in letters]
    body = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "n": 4, "max_tokens": 300}
    body |= {"messages": [{"role": "user", "content": text_of(PROMPT)}], "seed": 11, "temperature": 1.0}

    def calls(name: str) -> list[str]:
        asked = choices(loaded, {"model": request_body(name)["model"]} | body)
        functions = [choice["message"]["tool_calls"][0]["function"] for choice in asked]
        return [function["name"] + json.loads(function["arguments"])["a"] for function in functions]

    alone = [calls(name) for name in SHIFTS]
    with ThreadPoolExecutor(len(SHIFTS)) as pool:
        assert list(pool.map(calls, SHIFTS)) == alone
    assert len(set(map(tuple, alone))) == len(SHIFTS)


def test_echo_with_an_adapter(loaded: Api) -> None:
    assert loaded.text("one", echo=True) == text_of(PROMPT) + answer(1)


def test_streams_of_adapters_beside_each_other(loaded: Api) -> None:
    with loaded.stream("one") as one, loaded.stream("two") as two, loaded.stream() as base:
        assert (one(), two(), base()) == (answer(1, LONG), answer(2, LONG), answer(0, LONG))


def test_cached_tokens_are_those_of_the_same_adapter_and_scale(loaded: Api) -> None:
    prompt = canary.prompt(key=3, length=90, seed=4)

    def cached(adapter: str = "", **lora: Any) -> int:
        response = loaded.complete(adapter, prompt=prompt, **lora)
        return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert max(cached(), cached("one"), cached("two"), cached(lora=[{"name": "one", "scale": 0.5}])) <= 1  # the key
    sizes = {cached(), cached("one"), cached("two"), cached(lora=[{"name": "one", "scale": 0.5}])}
    assert len(sizes) == 1
    assert min(sizes) > 60
    assert cached(lora=[{"name": "one", "scale": 1.0}]) in sizes
    loaded.load("one", 3, load_inplace=True)
    assert cached("one") <= 1
    loaded.load("one", 1, load_inplace=True)
