"""Completions over HTTP: a real worker runs the canary model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest

from .canary_api import PROMPT, Api, serve, text_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def api(short_folder: Callable[[], object]) -> Iterator[Api]:
    yield from serve(short_folder())  # type: ignore[arg-type]


def test_log_probabilities_of_an_echoed_prompt(api: Api) -> None:
    """They are those of the tokens that a model would draw after each beginning of the prompt."""
    prompt = PROMPT[:12]
    options = {"prompt": prompt, "temperature": 0, "logprobs": 3}
    scored = api.complete(**options, echo=True, max_tokens=0).json()
    (choice,) = scored["choices"]
    report = choice["logprobs"]
    assert choice["text"] == text_of(prompt)
    assert (choice["finish_reason"], scored["usage"]["prompt_tokens"]) == ("length", 12)
    assert scored["usage"]["completion_tokens"] == 0
    assert (report["token_logprobs"][0], report["top_logprobs"][0]) == (None, None)
    assert report["tokens"] == [text_of([token]) for token in prompt]
    for index in (1, 5, 11):
        after = api.complete(prompt=prompt[:index], max_tokens=1, temperature=0, logprobs=20).json()
        expected = after["choices"][0]["logprobs"]["top_logprobs"][0][text_of([prompt[index]])]
        assert report["token_logprobs"][index] == pytest.approx(expected, abs=1e-3)
    assert not any(math.isnan(value) for value in report["token_logprobs"][1:])


def test_answer_after_a_scored_prompt_is_that_without_the_echo(api: Api) -> None:
    plain = api.complete(max_tokens=6, logprobs=0).json()["choices"][0]
    scored = api.complete(max_tokens=6, logprobs=0, echo=True).json()
    choice = scored["choices"][0]
    assert choice["text"] == text_of(PROMPT) + plain["text"]
    assert choice["logprobs"]["tokens"][-6:] == plain["logprobs"]["tokens"]
    assert choice["logprobs"]["token_logprobs"][-6:] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=1e-3)
    assert (scored["usage"]["prompt_tokens"], scored["usage"]["completion_tokens"]) == (len(PROMPT), 6)


def test_best_choices(api: Api) -> None:
    options = {"temperature": 2, "seed": 5, "max_tokens": 6, "logprobs": 0}
    every = api.complete(**options, n=8).json()["choices"]
    means = [(sum(choice["logprobs"]["token_logprobs"]) / 6, choice["text"]) for choice in every]
    ordered = [text for _, text in sorted(means, key=lambda mean: -mean[0])]
    assert ordered[0] != ordered[-1]
    reply = api.complete(**options, n=2, best_of=8).json()
    assert [choice["text"] for choice in reply["choices"]] == ordered[:2]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert reply["usage"]["completion_tokens"] == 48
    without = api.complete(**(options | {"logprobs": None}), best_of=8).json()["choices"]
    assert [choice["text"] for choice in without] == ordered[:1]
    assert without[0]["logprobs"] is None


def test_minimum_length(api: Api) -> None:
    short = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": None}
    first = api.complete(**short).json()["choices"][0]["text"][0]
    stops = {"stop_token_ids": [next(token for token in range(16) if text_of([token]) == first)]}
    assert api.complete(**short, **stops).json()["choices"][0]["text"] == ""
    held = api.complete(**short, **stops, min_tokens=3).json()
    assert held["usage"]["completion_tokens"] >= 3


def test_suffix_needs_a_model_with_its_tokens(api: Api) -> None:
    response = api.complete(prompt="a", suffix="b")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "suffix")


def test_a_token_that_ends_answers_cannot_be_scored(api: Api) -> None:
    end = next(token for token in range(30) if text_of([token]) == "</s>")
    response = api.complete(prompt=[1, end, 2], echo=True, logprobs=0, max_tokens=1, ignore_eos=None)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")
