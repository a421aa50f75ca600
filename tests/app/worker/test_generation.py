"""The engine requests of a Generate frame, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from localllm.app.chat.prompt import PromptMaker
from localllm.app.chat.template.renderer import TemplateRenderer
from localllm.app.chat.tokenizer.huggingface import ChatTokenizer
from localllm.app.errors import ContextTooLong, InvalidRequest, UnsupportedParameter, WrongKind
from localllm.app.frames import Generate, ResponseFormat
from localllm.app.purpose import Purpose
from localllm.app.worker.generation import prepare
from localllm.app.worker.opening import OpenModel
from localllm.engine.grammar import unpack_mask
from localllm.engine.request import Delta, Request
from localllm.engine.runner import CacheGroup, RunnerSpec

from ..samples import model_info
from ..tiny_harmony import write_harmony_tokenizer
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


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenModel]:
    """A model that answers in the format of app/chat/output/harmony.py."""
    tokenizer = ChatTokenizer(write_harmony_tokenizer(tmp_path_factory.mktemp("harmony")))
    renderer = TemplateRenderer()
    runner: Any = SimpleNamespace(spec=replace(SPEC, vocab_size=tokenizer.vocab_size, max_context=1024))
    opened = OpenModel(INFO, runner, tokenizer, renderer, PromptMaker(tokenizer, renderer), {})
    yield opened
    opened.close()


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
    assert not made.is_done("a/0")
    assert not made.is_done("a/1")


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
        ({"prompt": [5], "max_tokens": 2, "min_tokens": 3}, InvalidRequest, "min_tokens"),
        (
            {"prompt": [5], "min_tokens": 3, "response_format": ResponseFormat(kind="json_object")},
            UnsupportedParameter,
            "min_tokens",
        ),
    ],
)
def test_refusal_has_the_parameter(
    model: OpenModel, fields: dict[str, Any], kind: type[InvalidRequest], param: str
) -> None:
    with pytest.raises(kind) as caught:
        prepare(Generate(id="a", **fields), model)
    assert (type(caught.value), caught.value.param) == (kind, param)


def test_minimum_length_forbids_the_tokens_that_end_an_answer(model: OpenModel) -> None:
    made = prepare(Generate(id="a", prompt=[5], n=2, min_tokens=1, stop_ids=[4]), model)
    first, second = (request.grammar for request in made.requests)
    assert first is not None
    assert second is not None
    assert forbidden(first) == {2, 4}
    first.accept(7)
    assert (forbidden(first), forbidden(second)) == (set(), {2, 4})


def test_prompt_with_log_probabilities_is_repeated_token_by_token(model: OpenModel) -> None:
    frame = Generate(id="a", prompt=[5, 6, 7], echo=True, logprobs=0, max_tokens=0)
    made = prepare(frame, model)
    (request,) = made.requests
    assert (request.prompt, request.max_tokens) == ((5,), 2)
    assert request.grammar is not None
    for token in (6, 7):
        assert forbidden(request.grammar) == set(range(VOCAB)) - {token}
        request.grammar.accept(token)
    assert forbidden(request.grammar) == set()
    (piece,) = made.opening(model.tokenizer)
    assert [entry.id for entry in piece.logprobs] == [5]
    made.take(Delta("a/0", (6, 7), finish="length"))
    finished = made.finished()
    assert (finished.prompt_tokens, finished.completion_tokens) == (3, 0)
    for prompt, field in (([5], "max_tokens"), ([5, 2], "logprobs")):
        with pytest.raises(InvalidRequest) as refused:
            prepare(structs.replace(frame, prompt=prompt), model)
        assert refused.value.param == field
    with pytest.raises(UnsupportedParameter) as refused_suffix:
        prepare(Generate(id="a", prompt="a", suffix="b"), model)
    assert refused_suffix.value.param == "suffix"


def forbidden(grammar: Any) -> set[int]:
    allowed = unpack_mask(grammar.allowed()[None], VOCAB)[0]
    return {token for token in range(VOCAB) if not allowed[token]}


def test_wishes_for_the_template_are_honoured_or_reported(model: OpenModel, harmony: OpenModel) -> None:
    wishes: dict[str, Any] = {"reasoning": "high", "verbosity": "low", "template_kwargs": {"thinking_x": "y"}}
    assert prepare(Generate(id="a", messages=HI, **wishes), harmony).ignored == ("thinking_x", "reasoning", "verbosity")
    answers = [prepare(Generate(id="a", messages=HI, reasoning=level), model) for level in ("none", "high")]
    assert [(made.prompt.inside_reasoning, made.ignored) for made in answers] == [(False, ()), (True, ())]


def test_tools_are_in_the_prompt(model: OpenModel) -> None:
    generation = prepare(Generate(id="a", messages=HI, tools=TOOLS), model)
    assert generation.prompt.form.calls
    assert len(generation.prompt.ids) > len(prepare(Generate(id="a", messages=HI), model).prompt.ids)
    (request,) = generation.requests
    assert request.max_tokens == 256 - len(generation.prompt.ids)
    assert request.grammar is not None
    assert unpack_mask(request.grammar.allowed(), VOCAB).all()  # until a call begins


def test_finished_frame_counts_tokens(model: OpenModel) -> None:
    made = prepare(Generate(id="a", prompt=ids(3), n=2, max_tokens=9), model)
    made.take(Delta("a/0", (6, 7), finish="length", cached=3))
    made.take(Delta("a/1", (6,), cached=2))
    assert (made.is_done("a/0"), made.is_done("a/1"), made.has_ended) == (True, False, False)
    end = made.finished()
    assert (end.id, end.prompt_tokens, end.completion_tokens, end.cached_tokens) == ("a", 3, 3, 2)
    assert not end.cancelled
    assert made.finished(cancelled=True).cancelled


def test_echo_begins_every_choice_with_the_prompt(model: OpenModel) -> None:
    made = prepare(Generate(id="a", prompt="x", n=2, max_tokens=9, echo=True), model)
    pieces = made.opening(model.tokenizer)
    assert [(piece.choice, piece.text, piece.tokens) for piece in pieces] == [(0, "x", 0), (1, "x", 0)]
    made = prepare(Generate(id="a", prompt=ids(2), max_tokens=9, echo=True), model)
    assert [piece.text for piece in made.opening(model.tokenizer)] == [model.tokenizer.decode(ids(2))]
    assert prepare(Generate(id="a", prompt="x", max_tokens=9), model).opening(model.tokenizer) == []


@pytest.mark.parametrize(
    ("purpose", "frame", "words"),
    [
        ("embedding", Generate(id="a", prompt="x"), "m is an embedding model: it computes vectors"),
        ("embedding", Generate(id="a", messages=[]), "m is an embedding model: it computes vectors"),
        ("base", Generate(id="a", messages=[]), "m is a base model without a chat template"),
    ],
)
def test_model_of_another_purpose_refuses_the_request(
    model: OpenModel, purpose: Purpose, frame: Generate, words: str
) -> None:
    info = structs.replace(model.info, model="m", purpose=purpose)
    with pytest.raises(WrongKind, match=words):
        prepare(frame, replace(model, info=info))


def test_base_model_completes_text(model: OpenModel) -> None:
    info = structs.replace(model.info, purpose="base")
    assert prepare(Generate(id="a", prompt="x", max_tokens=2), replace(model, info=info)).requests


def allowed(request: Request, tokenizer: ChatTokenizer, text: str) -> bool:
    """Whether the grammar of the request allows the text as the beginning of an answer."""
    assert request.grammar is not None
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not unpack_mask(request.grammar.allowed(), tokenizer.vocab_size)[token]:
            return False
        request.grammar.accept(token)
    return True


CALL_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
CALL_G = CALL_F.replace("functions.f", "functions.g")
ANSWER = "<|channel|>final<|message|>hello"


@pytest.mark.parametrize(("text", "is_allowed"), [(CALL_F, False), (CALL_G, True), (ANSWER, False)])
def test_forced_tools_of_harmony_are_calls_in_its_format(harmony: OpenModel, text: str, is_allowed: bool) -> None:
    generation = prepare(Generate(id="a", messages=HI, tools=TOOLS, forced_tools=TOOLS[1:]), harmony)
    assert not generation.prompt.inside_answer
    assert allowed(generation.requests[0], harmony.tokenizer, text) == is_allowed


@pytest.mark.parametrize(("text", "is_allowed"), [(CALL_F, True), (CALL_G, True), (ANSWER, True), ("hello", False)])
def test_strict_tools_of_harmony_are_in_its_format(harmony: OpenModel, text: str, is_allowed: bool) -> None:
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    (request,) = prepare(Generate(id="a", messages=HI, tools=[strict, TOOLS[1]]), harmony).requests
    assert allowed(request, harmony.tokenizer, text) == is_allowed


@pytest.mark.parametrize("is_strict", [False, True])
def test_tools_of_harmony_that_need_a_grammar_cannot_continue_a_message(harmony: OpenModel, is_strict: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f", "strict": is_strict}}]
    messages = [*HI, {"role": "assistant", "content": "It is"}]
    frame = Generate(
        id="a", messages=messages, tools=tools, forced_tools=[] if is_strict else tools, continue_final_message=True
    )
    with pytest.raises(UnsupportedParameter, match="continue_final_message"):
        prepare(frame, harmony)


def test_structured_output_of_harmony_is_its_answer(harmony: OpenModel) -> None:
    frame = Generate(id="a", messages=HI, response_format=ResponseFormat(kind="regex", regex="[0-9]+"))
    generation = prepare(frame, harmony)
    (request,) = generation.requests
    assert harmony.tokenizer.decode(request.prompt).endswith("<|start|>assistant<|channel|>final<|message|>")
    assert not allowed(request, harmony.tokenizer, "<|channel|>")
    end = harmony.tokenizer.id_of("<|return|>")
    answer = (*harmony.tokenizer.encode("42", add_special_tokens=False), end)
    piece = generation.take(Delta("a/0", answer, finish="stop"))
    assert piece is not None
    assert (piece.text, piece.reasoning, piece.finish) == ("42", "", "stop")
