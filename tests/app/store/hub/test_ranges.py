"""The engine, the API and the terminal UI accept the same values of each sampling parameter. The engine takes hotter
temperatures, too, with which tests draw any token."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from localllm.app.api.body import decode
from localllm.app.api.openai import ChatBody
from localllm.app.errors import InvalidRequest
from localllm.app.tui.parameters import PARAMETERS, check
from localllm.engine.lora import Adapter
from localllm.engine.ranges import RANGES
from localllm.engine.request import Request, Sampling

# Values below a range that the API accepts as another form of a value in range.
ALIASES = {"max_tokens": -1, "top_k": -1, "top_p": 0, "seed": -1}


def engine(name: str, value: Any) -> None:
    if name == "max_tokens":
        Request("r", (1,), value)
    elif name == "adapter_scale":
        Request("r", (1,), 1, adapter=Adapter("a", "/a", "v"), adapter_scale=value)
    else:
        Sampling(**{name: ((5, value),) if name == "logit_bias" else value})


def api(name: str, value: Any) -> None:
    body: dict[str, Any] = {name: value}
    if name == "logprobs":
        body = {"logprobs": True, "top_logprobs": value}
    if name == "adapter_scale":
        body = {"lora": [{"name": "a", "scale": value}]}
    if name == "logit_bias":
        body = {"logit_bias": {"5": value}}
    decode(json.dumps({"messages": [{"role": "user", "content": "hi"}]} | body).encode(), ChatBody).frames("id")


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("program", [engine, api, check])
def test_every_program_has_the_same_range(name: str, program: Callable[[str, Any], None]) -> None:
    if program is check and name not in PARAMETERS:
        pytest.skip("the terminal UI does not set it")
    if program is engine and name in ("temperature", "min_tokens"):
        pytest.skip("the engine has another range, or no such parameter")
    limits = RANGES[name]
    step = 1 if limits.kind is int else 2**-20
    lowest = limits.low + step if limits.excludes_low else limits.low
    program(name, lowest)
    program(name, limits.high)
    beyond = [limits.high + step]
    if not (program is api and name in ALIASES):
        beyond.append(lowest - step)
    for value in beyond:
        with pytest.raises((ValueError, InvalidRequest)) as refused:
            program(name, value)
        message = str(refused.value)
        assert name in message
        assert str(limits) in message
        assert str(value) in message


def test_no_range_has_nan() -> None:
    assert [name for name, limits in RANGES.items() if math.nan in limits] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("temperature", "a number from 0 to 2"),
        ("top_p", "a number above 0 and up to 1"),
        ("presence_penalty", "a number from -2 to 2"),
        ("top_k", "an integer from 0 to 2^31 - 1"),
        ("seed", "an integer from 0 to 2^64 - 1"),
        ("logprobs", "an integer from 0 to 20"),
    ],
)
def test_range_in_words(name: str, words: str) -> None:
    assert str(RANGES[name]) == words
