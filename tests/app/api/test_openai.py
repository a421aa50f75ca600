"""From bodies to frames: every field has its effect, or is refused by name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ParsedChatCompletionMessage

from localllm.app.api.answers import ChatAnswer, Head
from localllm.app.api.body import decode
from localllm.app.api.openai import ChatBody, CompletionBody
from localllm.app.api.replies import UsageReport
from localllm.app.errors import InvalidRequest
from localllm.app.frames import Generate, Piece, ResponseFormat, ToolCallPiece

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
OTHER_TOOL = {"type": "function", "function": {"name": "subtract"}}
JSON_A = ResponseFormat(kind="json_schema", schema={"a": 1})
DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"properties": DEEP}


def chat(**body: Any) -> Generate:
    (frame,) = decode(json.dumps({"messages": HI} | body).encode(), ChatBody).frames("id")
    return frame


def completion(**body: Any) -> list[Generate]:
    return decode(json.dumps({"prompt": "hi"} | body).encode(), CompletionBody).frames("id")


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": None}, "temperature", None),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 40}, "top_k", 40),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"max_tokens": 7}, "max_tokens", 7),
        ({"max_completion_tokens": 7}, "max_tokens", 7),
        ({"max_tokens": 7, "max_completion_tokens": 7}, "max_tokens", 7),
        ({}, "max_tokens", None),
        ({"n": 3}, "n", 3),
        ({"stop": "a"}, "stop", ["a"]),
        ({"stop": ["a", "b"]}, "stop", ["a", "b"]),
        ({"stop_token_ids": [5]}, "stop_ids", [5]),
        ({"seed": 7}, "seed", 7),
        ({"seed": -1}, "seed", 2**63 - 1),
        ({"presence_penalty": 1}, "presence_penalty", 1.0),
        ({"frequency_penalty": -2}, "frequency_penalty", -2.0),
        ({"repetition_penalty": 1.1}, "repetition_penalty", 1.1),
        ({"logit_bias": {"7": -100}}, "logit_bias", {7: -100.0}),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": True, "top_logprobs": 20}, "logprobs", 20),
        ({"logprobs": False}, "logprobs", None),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"response_format": {"type": "text"}}, "response_format", None),
        ({"response_format": {"type": "json_object"}}, "response_format", ResponseFormat(kind="json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": 1}}}},
            "response_format",
            ResponseFormat(kind="json_schema", schema={"a": 1}),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"a": 1}, "strict": True},
                }
            },
            "response_format",
            ResponseFormat(kind="json_schema", schema={"a": 1}, strict=True),
        ),
        ({"guided_json": {"a": 1}}, "response_format", ResponseFormat(kind="json_schema", schema={"a": 1})),
        ({"regex": "a+"}, "response_format", ResponseFormat(kind="regex", regex="a+")),
        ({"guided_regex": "a+"}, "response_format", ResponseFormat(kind="regex", regex="a+")),
        ({"choice": ["a", "b"]}, "response_format", ResponseFormat(kind="choice", choices=["a", "b"])),
        ({"guided_choice": ["a"]}, "response_format", ResponseFormat(kind="choice", choices=["a"])),
        ({"tools": [TOOL]}, "tools", [TOOL]),
        ({"tools": []}, "tools", []),
        ({"tools": [TOOL], "tool_choice": "none"}, "tools", []),
        ({"tools": [TOOL], "tool_choice": "auto"}, "forced_tools", []),
        ({"tools": [TOOL, OTHER_TOOL], "tool_choice": "required"}, "forced_tools", [TOOL, OTHER_TOOL]),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "template_kwargs", {"enable_thinking": False}),
        # fields without effect
        ({"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"}, "n", 1),
        ({"store": False, "service_tier": "auto", "modalities": ["text"], "audio": None}, "n", 1),
        # values of other servers
        ({"max_tokens": -1}, "max_tokens", None),
        ({"max_completion_tokens": -1, "max_tokens": -1}, "max_tokens", None),
        ({"top_p": 0}, "top_p", 1e-7),
        ({"stop": [""]}, "stop", []),
        ({"stop": ["", "a"]}, "stop", ["a"]),
        ({"stop": ""}, "stop", []),
        ({"repeat_penalty": 1.1}, "repetition_penalty", 1.1),
        ({"min_tokens": 3}, "min_tokens", 3),
        ({"dry_multiplier": 0, "xtc_probability": 0, "mirostat": 0, "dry_base": 1.75}, "n", 1),
        ({"response_format": {"type": "json_object", "schema": {"a": 1}}}, "response_format", JSON_A),
        ({"response_format": {"type": "json_schema", "schema": {"a": 1}}}, "response_format", JSON_A),
        ({"reasoning_effort": "low"}, "reasoning", "low"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "high"),
        ({"reasoning": {"enabled": False}}, "reasoning", "none"),
        ({"enable_thinking": True}, "reasoning", "on"),
        ({"enable_thinking": False, "reasoning_effort": "medium"}, "reasoning", "medium"),
        ({"verbosity": "low"}, "verbosity", "low"),
    ],
)
def test_chat_field_reaches_the_worker(body: dict[str, Any], field: str, value: object) -> None:
    frame = chat(**body)
    assert getattr(frame, field) == value
    assert type(getattr(frame, field)) is type(value)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("model", ["x", "x" * 512], ["x" * 513]),
        ("temperature", [0, 2], [-0.001, 2.001]),
        ("top_p", [0, 0.0001, 1], [-0.0001, 1.0001]),
        ("top_k", [-1, 0, 2**31 - 1], [-2, 2**31]),
        ("min_p", [0, 1], [-0.001, 1.001]),
        ("n", [1, 128], [0, 129]),
        ("max_tokens", [-1, 1, 2**53 - 1], [-2, 0, 2**53]),
        ("max_completion_tokens", [-1, 1, 2**53 - 1], [-2, 0, 2**53]),
        ("min_tokens", [0, 2**31 - 1], [-1, 2**31]),
        ("repeat_penalty", [0.001, 100], [0, 100.001]),
        ("stop", ["", "x", "x" * 1024, ["x"] * 16, [""]], ["x" * 1025, ["x"] * 17]),
        ("stop_token_ids", [[0], [2**31 - 1], [1] * 64], [[-1], [2**31], [1] * 65]),
        ("seed", [-(2**63), 2**64 - 1], [-(2**63) - 1, 2**64]),
        ("presence_penalty", [-2, 2], [-2.001, 2.001]),
        ("frequency_penalty", [-2, 2], [-2.001, 2.001]),
        ("repetition_penalty", [0.001, 100], [0, 100.001]),
        (
            "logit_bias",
            [{"0": -100}, {"9999999999": 100}, {str(token): 1 for token in range(1024)}],
            [{"0": -100.001}, {"0": 100.001}, {"10000000000": 1}, {str(token): 1 for token in range(1025)}],
        ),
        ("choice", [["x"], ["x"] * 1024], [[], ["x"] * 1025]),
        ("guided_choice", [["x"], ["x"] * 1024], [[], ["x"] * 1025]),
    ],
)
def test_limits_of_ranges(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        chat(**{name: value})
    for value in bad:
        with pytest.raises(InvalidRequest) as refused:
            chat(**{name: value})
        assert refused.value.param is not None
        assert refused.value.param.startswith(name)


@pytest.mark.parametrize(("size", "good"), [(1, True), (64, True), (0, False), (65, False)])
def test_tool_name_pattern(size: int, good: bool) -> None:
    tool = {"type": "function", "function": {"name": ("aZ9_.-" * 11)[:size]}}
    if good:
        assert chat(tools=[tool]).tools == [tool]
    else:
        with pytest.raises(InvalidRequest):
            chat(tools=[tool])
    with pytest.raises(InvalidRequest):
        chat(tools=[{"type": "function", "function": {"name": "a\n"}}])


@pytest.mark.parametrize(
    ("last", "more", "good"),
    [
        ("assistant", {"continue_final_message": True}, True),
        ("assistant", {"continue_final_message": True, "add_generation_prompt": False}, True),
        ("assistant", {"continue_final_message": True, "add_generation_prompt": True}, False),
        ("user", {"continue_final_message": True}, False),
        ("user", {"continue_final_message": False, "add_generation_prompt": True}, True),
        ("user", {"add_generation_prompt": False}, False),
    ],
)
def test_continue_final_message(last: str, more: dict[str, bool], good: bool) -> None:
    messages = [{"role": last, "content": "x"}]
    if good:
        assert chat(messages=messages, **more).continue_final_message is bool(more.get("continue_final_message"))
    else:
        with pytest.raises(InvalidRequest) as refused:
            chat(messages=messages, **more)
        assert refused.value.param in more


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("usage", [None, False, True])
def test_stream_options_need_a_stream(stream: bool, usage: bool | None) -> None:
    body = decode(
        json.dumps({"messages": HI, "stream": stream, "stream_options": {"include_usage": usage}}).encode(), ChatBody
    )
    assert body.wants_usage is bool(usage)
    if stream:
        body.check()
    else:
        with pytest.raises(InvalidRequest):
            body.check()
    assert not decode(b'{"messages":[]}'.replace(b"[]", json.dumps(HI).encode()), ChatBody).wants_usage


def test_assistant_message_accepts_all_reply_fields() -> None:
    said = {"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b", "annotations": []}
    frame = chat(messages=[said])
    assert frame.messages == [{"role": "assistant", "content": "x", "reasoning_content": "b"}]
    for more in ({"annotations": [1]}, {"audio": {}}, {"function_call": {}}):
        with pytest.raises(InvalidRequest):
            chat(messages=[{"role": "assistant", "content": "x"} | more])


CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}


@pytest.mark.parametrize(
    "fields",
    [
        {"parsed": None},
        {"parsed": {"a": [1]}},
        {"refusal": None, "audio": None, "function_call": None, "annotations": None, "tool_calls": None, "name": None},
        {"annotations": [], "tool_calls": [], "images": []},
        {"provider_specific_fields": {"refusal": None, "citations": [1]}},
        {"reasoning_details": None, "reasoning_items": [], "thinking_blocks": []},
        {"cache_control": {"type": "ephemeral"}},
    ],
)
def test_fields_of_client_libraries_have_no_effect(fields: dict[str, Any]) -> None:
    answer = {"role": "assistant", "content": "x"}
    assert chat(messages=[answer | fields]).messages == [answer]


@pytest.mark.parametrize("name", ["reasoning_details", "reasoning_items", "thinking_blocks"])
def test_other_forms_of_reasoning_are_accepted_beside_its_text(name: str) -> None:
    answer = {"role": "assistant", "content": "x", name: [{"text": "why"}]}
    for field in ("reasoning", "reasoning_content"):
        (message,) = chat(messages=[answer | {field: "why"}]).messages or []
        assert message == {"role": "assistant", "content": "x", "reasoning_content": "why"}


@pytest.mark.parametrize(
    ("fields", "thoughts"),
    [
        (
            {
                "reasoning_details": [
                    {"type": "reasoning.text", "text": "why"},
                    {"type": "reasoning.text", "text": "so"},
                ]
            },
            "why\nso",
        ),
        ({"reasoning_details": [{"type": "reasoning.summary", "summary": "why"}]}, "why"),
        ({"thinking_blocks": [{"type": "thinking", "thinking": "why", "signature": "s"}]}, "why"),
        ({"reasoning_items": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}]}]}, "why"),
        ({"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}, 1, None]}, None),
        ({"reasoning_details": [{"summary": [[[]]], "text": 3}]}, None),
    ],
)
def test_other_forms_of_reasoning_are_its_text(fields: dict[str, Any], thoughts: str | None) -> None:
    (message,) = chat(messages=[{"role": "assistant", "content": "x"} | fields]).messages or []
    assert message.get("reasoning_content") == thoughts


def test_refusal_is_the_content_of_a_message_without_another() -> None:
    for message in (
        {"refusal": "no"},
        {"content": None, "refusal": "no"},
        {"content": [{"type": "refusal", "refusal": "no"}]},
        {"content": "no", "refusal": "never"},
    ):
        assert chat(messages=[{"role": "assistant"} | message]).messages == [{"role": "assistant", "content": "no"}]
    with pytest.raises(InvalidRequest):
        chat(messages=[{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}])


@pytest.mark.parametrize(
    ("fields", "function"),
    [
        ({}, {"parsed_arguments": None}),
        ({}, {"parsed_arguments": {"a": 1}}),
        ({}, {"parsed_arguments": "x", "provider_specific_fields": None}),
        ({"index": 0, "provider_specific_fields": {"a": 1}, "extra_content": {"google": {}}}, {}),
    ],
)
def test_fields_of_earlier_calls_have_no_effect(fields: dict[str, Any], function: dict[str, Any]) -> None:
    call = CALL | fields | {"function": CALL["function"] | function}  # type: ignore[operator]
    (message,) = chat(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}]).messages or []
    assert message == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_text_part_may_have_fields_of_client_libraries() -> None:
    part = {"type": "text", "text": "x", "annotations": [], "cache_control": {}, "prompt_cache_breakpoint": None}
    assert chat(messages=[{"role": "user", "content": [part]}]).messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("nones", [False, True])
def test_history_of_the_openai_package(nones: bool) -> None:
    """The message of an answer of this API, streamed or not, as the package writes it."""
    call = ToolCallPiece(index=0, id="c", name="add", arguments="{}")
    pieces = [Piece(id="a", reasoning="hm", text="t"), Piece(id="a", tool_calls=[call], finish="tool_calls")]
    answer = ChatAnswer(Head("id", "m", "f"), 1, logprobs=False, usage=False)
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for data in (answer.opening(), *(answer.part(0, piece) for piece in pieces)):
        for line in data.decode().split("\n\n")[:-1]:
            state.handle_chunk(ChatCompletionChunk.model_validate_json(line.removeprefix("data: ")))
    for piece in pieces:
        answer.take(0, piece)
    whole = ChatCompletion.model_validate_json(answer.document(UsageReport()))
    parsed = ParsedChatCompletionMessage[Any].model_validate(whole.choices[0].message.model_dump())
    streamed = state.get_final_completion().choices[0].message
    for message in (whole.choices[0].message, parsed, streamed):
        (history,) = chat(messages=[message.model_dump(exclude_none=not nones)]).messages or []
        assert history == {"role": "assistant", "content": "t", "reasoning_content": "hm", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    "parameters",
    [{"type": "string"}, {"type": "array"}, {"type": ["null"]}],
)
@pytest.mark.parametrize("choice", [None, "none", "required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("strict", [False, True])
def test_parameters_of_a_tool_describe_an_object(parameters: dict[str, Any], choice: Any, strict: bool) -> None:
    wrong = {"type": "function", "function": {"name": "add", "parameters": parameters, "strict": strict}}
    with pytest.raises(InvalidRequest) as refused:
        chat(tools=[OTHER_TOOL, wrong], tool_choice=choice)
    assert (refused.value.status, refused.value.param) == (400, "tools[1].function.parameters")


@pytest.mark.parametrize("parameters", [True, False, [], "object", 1])
def test_parameters_of_a_tool_are_a_schema_object(parameters: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(tools=[{"type": "function", "function": {"name": "add", "parameters": parameters}}])
    assert refused.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize(
    "parameters",
    [None, {}, {"properties": {}}, {"type": ["object", "null"]}, {"$ref": "#/$defs/A", "$defs": {"A": {}}}],
)
def test_parameters_without_a_type_are_an_object(parameters: Any) -> None:
    function = {"name": "add"} if parameters is None else {"name": "add", "parameters": parameters}
    assert chat(tools=[{"type": "function", "function": function}]).tools[0]["function"] == function


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": HI * 16_385}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 2049}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 129}]}, "messages[0].tool_calls"),
        ({"tools": [OTHER_TOOL] * 129}, "tools"),
        ({"lora": [{"name": "a"}] * 17}, "lora"),
        ({"modalities": ["text"] * 2}, "modalities"),
        ({"metadata": {str(number): "" for number in range(1025)}}, "metadata"),
    ],
)
def test_lists_have_limits(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**body)
    assert refused.value.param == param
    assert len(refused.value.message) < 200


def test_named_tool_is_forced() -> None:
    choice = {"type": "function", "function": {"name": "add"}}
    frame = chat(tools=[OTHER_TOOL, TOOL], tool_choice=choice)
    assert (frame.tools, frame.forced_tools) == ([OTHER_TOOL, TOOL], [TOOL])


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"temprature": 1}, "unsupported_parameter", "temprature"),
        ({"temperature": -1}, "invalid_request", "temperature"),
        ({"temperature": "1"}, "invalid_request", "temperature"),
        ({"temperature": True}, "invalid_request", "temperature"),
        ({"temperature": 1e9}, "invalid_request", "temperature"),
        ({"top_p": 1.1}, "invalid_request", "top_p"),
        ({"top_k": -2}, "invalid_request", "top_k"),
        ({"min_p": 2}, "invalid_request", "min_p"),
        ({"n": 0}, "invalid_request", "n"),
        ({"n": 129}, "invalid_request", "n"),
        ({"max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"max_tokens": 1.5}, "invalid_request", "max_tokens"),
        ({"max_tokens": 10**30}, "invalid_request", "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "invalid_request", "max_tokens"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "invalid_request", "repeat_penalty"),
        ({"dry_multiplier": 0.8}, "unsupported_parameter", "dry_multiplier"),
        ({"xtc_probability": 0.1}, "unsupported_parameter", "xtc_probability"),
        ({"mirostat": 2}, "unsupported_parameter", "mirostat"),
        ({"repeat_last_n": 64}, "unsupported_parameter", "repeat_last_n"),
        ({"skip_special_tokens": False}, "unsupported_parameter", "skip_special_tokens"),
        ({"temperature": 2.5}, "invalid_request", "temperature"),
        ({"reasoning_effort": "huge"}, "invalid_request", "reasoning_effort"),
        (
            {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}},
            "invalid_request",
            "response_format",
        ),
        ({"stop": ["a"] * 17}, "invalid_request", "stop"),
        ({"stop": [1]}, "invalid_request", "stop[0]"),
        ({"seed": 2**64}, "invalid_request", "seed"),
        ({"presence_penalty": 3}, "invalid_request", "presence_penalty"),
        ({"logit_bias": {"a": 1}}, "invalid_request", "logit_bias"),
        ({"logit_bias": {"7": 1, "07": 1}}, "invalid_request", "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "invalid_request", "logit_bias"),
        ({"logit_bias": {"²": 1}}, "invalid_request", "logit_bias"),
        ({"logit_bias": {"1": 101}}, "invalid_request", "logit_bias"),
        ({"top_logprobs": 2}, "invalid_request", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_request", "top_logprobs"),
        ({"logprobs": 3}, "invalid_request", "logprobs"),
        ({"stream_options": {"include_usage": True}}, "invalid_request", "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "unsupported_parameter", "stream_options.x"),
        ({"audio": {"voice": "x"}}, "unsupported_parameter", "audio"),
        ({"modalities": ["text", "audio"]}, "unsupported_parameter", "modalities"),
        ({"prediction": {}}, "unsupported_parameter", "prediction"),
        ({"web_search_options": {}}, "unsupported_parameter", "web_search_options"),
        ({"functions": []}, "unsupported_parameter", "functions"),
        ({"suffix": "x"}, "unsupported_parameter", "suffix"),
        ({"regex": "a", "choice": ["b"]}, "invalid_request", "choice"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "invalid_request", "regex"),
        ({"response_format": {"type": "xml"}}, "invalid_request", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "invalid_request", "response_format"),
        ({"guided_json": DEEP}, "invalid_request", "guided_json"),
        ({"tools": [{"type": "retrieval"}]}, "invalid_request", "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "invalid_request", "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "invalid_request", "tools[1]"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": DEEP}}]},
            "invalid_request",
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, "invalid_request", "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "invalid_request", "tool_choice"),
        ({"tool_choice": "any"}, "invalid_request", "tool_choice"),
        ({"chat_template_kwargs": {"tokenize": True}}, "unsupported_parameter", "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"thinking": [1]}}, "invalid_request", "chat_template_kwargs.thinking"),
        ({"add_generation_prompt": False}, "unsupported_parameter", "add_generation_prompt"),
        ({"continue_final_message": True}, "invalid_request", "continue_final_message"),
        ({"messages": []}, "invalid_request", "messages"),
        ({"messages": "hi"}, "invalid_request", "messages"),
        ({"messages": [{"role": "wizard", "content": ""}]}, "invalid_request", "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "invalid_request", "messages[0]"),
        ({"messages": [{"role": "user", "content": None}]}, "invalid_request", "messages[0].content"),
        ({"messages": ["hi"]}, "invalid_request", "messages[0]"),
        ({"messages": [{"content": "x"}]}, "invalid_request", "messages[0]"),
        ({"messages": [*HI, {"role": "user", "content": 3}]}, "invalid_request", "messages[1].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "invalid_request", "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "invalid_request", "messages[0].content[0]"),
        ({"messages": [{"role": "assistant"}]}, "invalid_request", "messages[0].content"),
        ({"messages": [*HI, {"role": "assistant", "tool_calls": []}]}, "invalid_request", "messages[1].content"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]},
            "unsupported_parameter",
            "messages[0].tool_calls",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "invalid_request", "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "invalid_request", "messages[0].tool_calls[0]"),
        ({"tools": [{"function": {}}]}, "invalid_request", "tools[0].function"),
        ({"tools": [{"function": {"name": ""}}]}, "invalid_request", "tools[0].function.name"),
        ({"tools": [{"function": {"name": 5}}]}, "invalid_request", "tools[0].function.name"),
        ({"messages": [{"role": "user", "content": "", "x": 1}]}, "unsupported_parameter", "messages[0].x"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "unsupported_parameter",
            "messages[0].content[0].type",
        ),
        ({"model": ""}, "invalid_request", "model"),
    ],
)
def test_chat_refuses_by_name(body: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**body)
    assert (refused.value.code, refused.value.param) == (code, param)
    assert param.split("[")[0] in refused.value.message or refused.value.code == "invalid_request"


def test_typo_gets_a_suggestion() -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(temprature=1)
    assert refused.value.hint == "did you mean 'temperature'?"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'{"a"', b'{"messages":"\\ud800"}', b"{}x"])
def test_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode(body, ChatBody)


def test_deeply_nested_json_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        decode(b'{"guided_json":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}", ChatBody)


def test_messages_are_converted_for_frames() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{"}}
    frame = chat(
        messages=[
            {
                "role": "developer",
                "content": [{"type": "text", "text": "be brief"}, {"type": "text", "text": "and kind"}],
            },
            {"role": "user", "content": "1+1?", "name": "ann"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call | {"index": 0}],
                "reasoning": "hm",
                "refusal": None,
            },
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
            {"role": "assistant", "content": "It is"},
        ],
        continue_final_message=True,
        add_generation_prompt=False,
    )
    assert frame.continue_final_message
    assert frame.messages == [
        {"role": "developer", "content": "be brief\nand kind"},
        {"role": "user", "content": "1+1?", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "assistant", "content": "It is"},
    ]


def assistant_calls(*ids: str) -> dict[str, Any]:
    calls = [{"id": name, "type": "function", "function": {"name": "add", "arguments": "{}"}} for name in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result_of(identifier: str) -> dict[str, Any]:
    return {"role": "tool", "content": "2", "tool_call_id": identifier}


USER = {"role": "user", "content": "1+1?"}


@pytest.mark.parametrize(
    ("messages", "index", "reason"),
    [
        ([USER, assistant_calls("a"), result_of("b")], 2, "no tool call with this id: 'b'"),
        ([USER, assistant_calls("a", "b"), result_of("b"), result_of("c")], 3, "no tool call with this id: 'c'"),
        ([USER, assistant_calls("a"), result_of("a"), result_of("a")], 3, "a message before it has the result"),
        ([USER, assistant_calls("a"), result_of("a"), assistant_calls("b"), result_of("a")], 4, "no tool call"),
        ([USER, assistant_calls("a"), USER, result_of("a")], 3, "no tool call"),
        ([USER, {"role": "assistant", "content": "2"}, result_of("a")], 2, "no tool call"),
        ([result_of("x" * 1000)], 0, "x{100}'$"),
    ],
)
def test_a_result_without_its_call_is_refused(messages: list[Any], index: int, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        chat(messages=messages)
    assert caught.value.param == f"messages[{index}].tool_call_id"
    assert str(caught.value).startswith(caught.value.param)


def test_results_in_any_order_and_calls_without_a_result_are_accepted() -> None:
    messages = [USER, assistant_calls("a", "b", "c"), result_of("c"), result_of("a"), USER]
    assert len(chat(messages=messages).messages) == 5
    twins = [USER, assistant_calls("a", "a"), result_of("a"), result_of("a")]
    assert len(chat(messages=twins).messages) == 4


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a"] * 128, ["a"] * 128),
        ([1] * 200, [[1] * 200]),
    ],
)
def test_forms_of_prompt(prompt: Any, prompts: list[Any]) -> None:
    frames = completion(prompt=prompt)
    assert [frame.prompt for frame in frames] == prompts
    assert len({frame.id for frame in frames}) == len(prompts)
    assert all(frame.max_tokens == 16 for frame in frames)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"prompt": []}, "invalid_request", "prompt"),
        ({"prompt": ""}, "invalid_request", "prompt"),
        ({"prompt": [[]]}, "invalid_request", "prompt"),
        ({"prompt": ["a", 1]}, "invalid_request", "prompt"),
        ({"prompt": [-1]}, "invalid_request", "prompt[0]"),
        ({"prompt": ["a"] * 129}, "invalid_request", "prompt"),
        ({"prompt": [[1]] * 129}, "invalid_request", "prompt"),
        ({"prompt": ["a", [1]]}, "invalid_request", "prompt"),
        ({"prompt": [[1], 1]}, "invalid_request", "prompt"),
        ({"prompt": ["a", ""]}, "invalid_request", "prompt"),
        ({"echo": True, "logprobs": 1, "stop": "x"}, "unsupported_parameter", "stop"),
        ({"echo": True, "logprobs": 1, "presence_penalty": 1}, "unsupported_parameter", "presence_penalty"),
        ({"echo": True, "max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"logprobs": 1, "max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"logprobs": 21}, "invalid_request", "logprobs"),
        ({"best_of": 2, "n": 3}, "invalid_request", "best_of"),
        ({"best_of": 2, "stream": True}, "unsupported_parameter", "best_of"),
        ({"best_of": 129}, "invalid_request", "best_of"),
        ({"suffix": "x", "echo": True}, "unsupported_parameter", "suffix"),
        ({"suffix": "x", "prompt": ["a"]}, "unsupported_parameter", "suffix"),
        ({"messages": []}, "unsupported_parameter", "messages"),
    ],
)
def test_completion_refuses_by_name(body: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        completion(**body)
    assert (refused.value.code, refused.value.param) == (code, param)


def test_forms_of_completions() -> None:
    (scored,) = completion(echo=True, logprobs=1, max_tokens=0)
    assert (scored.echo, scored.logprobs, scored.max_tokens) == (True, 1, 0)
    (best,) = completion(best_of=4, n=2)
    assert (best.n, best.logprobs) == (4, 0)
    (same,) = completion(best_of=2, n=2)
    assert (same.n, same.logprobs) == (2, None)
    (middle,) = completion(prompt="", suffix="b")
    assert (middle.prompt, middle.suffix) == ("", "b")
    assert completion(suffix="")[0].suffix is None


def test_every_field_of_generate_has_a_request_field() -> None:
    """A new field of Generate needs a field of the request, or an entry in this list."""
    not_sampling = {"id", "messages", "prompt", "suffix", "echo", "fit_max_tokens"}
    asked = chat(
        temperature=0.5, top_k=1, min_tokens=1, reasoning_effort="low", verbosity="low",
        top_p=0.5, min_p=0.5, n=2, max_tokens=1, stop=["a"], stop_token_ids=[1], seed=1,
        presence_penalty=1, frequency_penalty=1, repetition_penalty=2, logit_bias={"1": 1}, ignore_eos=True,
        logprobs=True, response_format={"type": "json_object"}, tools=[TOOL], tool_choice="required",
        parallel_tool_calls=False, chat_template_kwargs={"thinking": True}, continue_final_message=True,
        lora=[{"name": "a", "scale": 0.5}],
        messages=[{"role": "assistant", "content": "x"}],
    )  # fmt: skip
    plain = Generate(id="id", messages=[])
    same = {name for name in Generate.__struct_fields__ if getattr(asked, name) == getattr(plain, name)}
    assert same - not_sampling == set()
    assert msgspec.to_builtins(asked)["type"] == "Generate"
