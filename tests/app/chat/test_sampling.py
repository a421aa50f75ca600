from __future__ import annotations

from typing import Any

import pytest

from localllm.app.chat.sampling import sampling_of
from localllm.app.errors import InvalidRequest
from localllm.app.frames import Generate
from localllm.engine.request import Sampling


def sampling(recommended: dict[str, float] | None = None, **fields: Any) -> Sampling:
    return sampling_of(Generate(id="a", prompt="x", **fields), recommended or {}, seed=7, vocab_size=100)


def test_the_request_precedes_the_model_and_the_model_the_default() -> None:
    assert sampling() == Sampling(temperature=1.0, seed=7)
    model = {"temperature": 0.6, "top_k": 20.0, "top_p": 0.9}
    assert sampling(model) == Sampling(temperature=0.6, top_k=20, top_p=0.9, seed=7)
    assert sampling(model, temperature=0.0, top_k=0) == Sampling(temperature=0.0, top_k=0, top_p=0.9, seed=7)


def test_all_fields_of_the_request_are_used() -> None:
    fields = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.4,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.3,
        "logprobs": 5,
    }
    assert sampling(**fields, logit_bias={3: -100.0, 99: 1.5}) == Sampling(
        **fields, logit_bias=((3, -100.0), (99, 1.5)), seed=7
    )


def test_seed_wraps_to_64_bits() -> None:
    request = Generate(id="a", prompt="x")
    assert sampling_of(request, {}, seed=-1, vocab_size=9).seed == 2**64 - 1
    assert sampling_of(request, {}, seed=2**64 + 3, vocab_size=9).seed == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_k", -2),
        ("top_p", 0.0),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("logprobs", 21),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: float("nan")}),
    ],
)
def test_a_refusal_names_the_parameter(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sampling(**{name: value})
    assert caught.value.param == name


def test_suppressed_tokens_are_banned() -> None:
    request = Generate(id="a", prompt="x", logit_bias={3: 5.0, 4: 1.0})
    biases = sampling_of(request, {}, (3, 8), seed=0, vocab_size=9).logit_bias
    assert dict(biases) == {3: -100.0, 4: 1.0, 8: -100.0}
