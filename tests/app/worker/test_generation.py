"""The engine requests of a Generate frame, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.app.chat.prompt import PromptMaker
from localllm.app.chat.template import TemplateRenderer
from localllm.app.chat.tokenizer import ChatTokenizer
from localllm.app.errors import ContextTooLong, InvalidRequest
from localllm.app.frames import Generate
from localllm.app.worker.generation import prepare
from localllm.app.worker.opening import OpenModel
from localllm.engine.request import Delta
from localllm.engine.runner import CacheGroup, RunnerSpec

from ..samples import model_info
from ..tiny_qwen import VOCAB, write_tokenizer

SPEC = RunnerSpec(vocab_size=VOCAB, max_tokens=64, max_rows=8, max_context=256, groups=(CacheGroup(16, 100),))
INFO = model_info(context=256, vocab=VOCAB)
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenModel]:
    tokenizer = ChatTokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")), [2])
    renderer = TemplateRenderer()
    runner: Any = SimpleNamespace(spec=SPEC)
    made = OpenModel(INFO, runner, tokenizer, renderer, PromptMaker(tokenizer, renderer), {"temperature": 0.5})
    yield made
    made.close()


def ids(count: int) -> list[int]:
    return [5] * count


def test_choices_differ_only_in_id_and_seed(model: OpenModel) -> None:
    made = prepare(Generate(id="a", prompt=ids(3), n=2, seed=7, max_tokens=9, stop_ids=[4]), model)
    first, second = made.requests
    assert (first.id, second.id) == ("a/0", "a/1")
    assert (first.sampling.seed, second.sampling.seed) == (7, 8)
    assert replace(second, id="a/0", sampling=first.sampling) == first
    assert (first.prompt, first.max_tokens, first.stop_ids) == ((5, 5, 5), 9, {2, 4})
    assert (first.sampling.temperature, first.grammar) == (0.5, None)
    assert made.live == ["a/0", "a/1"]


def test_ignore_eos_keeps_requested_stop_ids(model: OpenModel) -> None:
    (request,) = prepare(Generate(id="a", prompt=ids(1), ignore_eos=True, stop_ids=[4]), model).requests
    assert request.stop_ids == {4}


@pytest.mark.parametrize(("pages", "room"), [(100, 256), (2, 32)])
def test_answer_without_a_limit_may_use_the_rest_of_the_context(
    model: OpenModel, monkeypatch: pytest.MonkeyPatch, pages: int, room: int
) -> None:
    """The rest of the context, or of a smaller cache."""
    monkeypatch.setattr(model.runner, "spec", replace(SPEC, groups=(CacheGroup(16, pages),)))
    (request,) = prepare(Generate(id="a", prompt=ids(room - 1)), model).requests
    assert request.max_tokens == 1
    with pytest.raises(ContextTooLong) as caught:
        prepare(Generate(id="a", prompt=ids(room)), model)
    assert (caught.value.param, caught.value.numbers) == ("prompt", {"n_prompt_tokens": room, "n_ctx": 256})


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"prompt": [-1]}, InvalidRequest, "prompt"),
        ({"prompt": [5, VOCAB]}, InvalidRequest, "prompt"),
        ({"prompt": [5], "stop_ids": [5, VOCAB]}, InvalidRequest, "stop_token_ids"),
        ({"prompt": [5], "logit_bias": {VOCAB: 1.0}}, InvalidRequest, "logit_bias"),
        ({"prompt": []}, InvalidRequest, "prompt"),
        ({"prompt": [5], "max_tokens": 0}, InvalidRequest, "max_tokens"),
    ],
)
def test_refusal_has_the_parameter(
    model: OpenModel, fields: dict[str, Any], kind: type[InvalidRequest], param: str
) -> None:
    with pytest.raises(kind) as caught:
        prepare(Generate(id="a", **fields), model)
    assert (type(caught.value), caught.value.param) == (kind, param)


def test_tools_are_in_the_prompt(model: OpenModel) -> None:
    generation = prepare(Generate(id="a", messages=HI, tools=TOOLS), model)
    assert generation.prompt.tools
    assert len(generation.prompt.ids) > len(prepare(Generate(id="a", messages=HI), model).prompt.ids)
    (request,) = generation.requests
    assert (request.grammar, request.max_tokens) == (None, 256 - len(generation.prompt.ids))


def test_finished_frame_counts_tokens(model: OpenModel) -> None:
    made = prepare(Generate(id="a", prompt=ids(3), n=2, max_tokens=9), model)
    made.take(Delta("a/0", (6, 7), finish="length", cached=3))
    made.take(Delta("a/1", (6,), cached=2))
    assert made.live == ["a/1"]
    end = made.finished()
    assert (end.id, end.prompt_tokens, end.completion_tokens, end.cached_tokens) == ("a", 3, 3, 2)
    assert not end.cancelled
    assert made.finished(cancelled=True).cancelled
    assert [(piece.choice, piece.text, piece.tokens) for piece in made.echo("x")] == [(0, "x", 0), (1, "x", 0)]
