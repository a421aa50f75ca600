"""The bytes of OpenAI's answers, from pieces."""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

import msgspec
import pytest

from localllm.app.api.answers import ChatAnswer, CompletionAnswer, Head, error_event, event
from localllm.app.api.replies import UsageReport
from localllm.app.errors import AppError, ContextTooLong
from localllm.app.frames import Piece, PieceLogprob, ToolCallPiece

from ..daemon.conftest import events

HEAD = Head("id", "m", "f", created=7)
COMMON = {"id": "id", "created": 7, "model": "m", "system_fingerprint": "f"}
USAGE = UsageReport(prompt_tokens=1, completion_tokens=2, total_tokens=3)


def logprob(token: str, value: float, *top: PieceLogprob) -> PieceLogprob:
    return PieceLogprob(token=token, id=1, bytes=list(token.encode()), logprob=value, top=list(top))


def parsed(data: bytes) -> list[Any]:
    return events(data.decode())


def test_line_breaks_of_some_clients_are_escaped() -> None:
    data = event("a\u2028b\u2029c\x85d\ne")
    assert data == rb'data: "a\u2028b\u2029c\u0085d\ne"' + b"\n\n"
    assert len(data.decode().splitlines()) == 2


def test_streamed_chat() -> None:
    answer = ChatAnswer(HEAD, 2, logprobs=False, usage=True)
    role = {"role": "assistant", "content": ""}
    assert [chunk["choices"] for chunk in parsed(answer.opening())] == [
        [{"index": index, "delta": role, "logprobs": None, "finish_reason": None}] for index in (0, 1)
    ]
    (chunk,) = parsed(answer.part(1, Piece(id="a", text="x", logprobs=[logprob("x", -1.0)])))
    assert chunk == COMMON | {
        "object": "chat.completion.chunk",
        "choices": [{"index": 1, "delta": {"content": "x"}, "logprobs": None, "finish_reason": None}],
        "usage": None,
    }
    (thought,) = parsed(answer.part(0, Piece(id="a", reasoning="hm")))
    assert thought["choices"][0]["delta"] == {"reasoning": "hm", "reasoning_content": "hm"}
    text, end = parsed(answer.part(0, Piece(id="a", text="y", finish="length")))
    assert text["choices"][0]["finish_reason"] is None
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "length")
    assert answer.part(0, Piece(id="a", tokens=1)) == b""
    with pytest.raises(AppError):
        answer.closing(USAGE)  # one choice has no finish reason
    answer.part(1, Piece(id="a", finish="stop"))
    closing = answer.closing(USAGE)
    (last,) = parsed(closing)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 3)
    assert closing.endswith(b"\n\ndata: [DONE]\n\n")


def test_token_without_text_has_an_event_if_logprobs_are_requested() -> None:
    answer = ChatAnswer(HEAD, 1, logprobs=True, usage=False)
    entry = logprob("t", -math.inf, logprob("u", -math.inf))
    (chunk,) = parsed(answer.part(0, Piece(id="a", logprobs=[entry])))
    assert "usage" not in chunk
    assert chunk["choices"][0]["delta"] == {"content": ""}
    assert chunk["choices"][0]["logprobs"]["content"] == [
        {
            "token": "t",
            "logprob": -9999.0,
            "bytes": [116],
            "top_logprobs": [{"token": "u", "logprob": -9999.0, "bytes": [117]}],
        }
    ]
    (bare,) = parsed(answer.part(0, Piece(id="a", text="x")))
    assert bare["choices"][0]["logprobs"] is None
    answer.part(0, Piece(id="a", finish="stop"))
    assert answer.closing(USAGE) == b"data: [DONE]\n\n"


def test_streamed_call_has_its_name_once() -> None:
    answer = ChatAnswer(HEAD, 1, logprobs=False, usage=False)
    pieces = [
        ToolCallPiece(index=1, id="c", name="f"),
        ToolCallPiece(index=1, name="f"),
        ToolCallPiece(index=1, arguments="{}"),
    ]
    deltas = [parsed(answer.part(0, Piece(id="a", tool_calls=[call])))[0]["choices"][0]["delta"] for call in pieces]
    assert [delta["tool_calls"] for delta in deltas] == [
        [{"index": 1, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}],
        [{"index": 1, "id": "", "type": "function", "function": {"name": "f", "arguments": ""}}],
        [{"index": 1, "function": {"arguments": "{}"}}],
    ]


@pytest.mark.parametrize(("text", "content"), [("", None), ("hi", "hi")])
def test_chat_document_with_tool_calls(text: str, content: str | None) -> None:
    answer = ChatAnswer(HEAD, 1, logprobs=True, usage=False)
    answer.take(0, Piece(id="a", text=text, tool_calls=[ToolCallPiece(index=1, id="d", name="g", arguments="{}")]))
    answer.take(0, Piece(id="a", tool_calls=[ToolCallPiece(index=0, id="c", name="f", arguments='{"a":')]))
    answer.take(0, Piece(id="a", tool_calls=[ToolCallPiece(index=0, arguments="1}")], finish="tool_calls"))
    answer.take(0, Piece(id="a"))
    whole = json.loads(answer.document(USAGE))
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["logprobs"] is None
    assert "reasoning" not in choice["message"]
    assert choice["message"]["content"] == content
    assert [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in choice["message"]["tool_calls"]
    ] == [
        ("c", "f", '{"a":1}'),
        ("d", "g", "{}"),
    ]
    assert {name: whole[name] for name in COMMON} == COMMON
    assert whole["usage"]["total_tokens"] == 3


def test_empty_chat_document_has_text() -> None:
    answer = ChatAnswer(HEAD, 2, logprobs=True, usage=False)
    answer.take(1, Piece(id="a", reasoning="h", logprobs=[logprob("t", -1.0)], finish="stop"))
    with pytest.raises(AppError):
        answer.document(USAGE)
    answer.take(0, Piece(id="a", finish="length"))
    empty, thought = json.loads(answer.document(USAGE))["choices"]
    assert (empty["index"], empty["message"]["content"], empty["finish_reason"]) == (0, "", "length")
    assert "tool_calls" not in empty["message"]
    assert (thought["message"]["reasoning"], thought["message"]["reasoning_content"]) == ("h", "h")
    assert [entry["token"] for entry in thought["logprobs"]["content"]] == ["t"]


def test_text_offsets_continue_over_pieces() -> None:
    pieces = [
        Piece(id="a", text="ab", logprobs=[logprob("ab", -1.0, logprob("c", -2.0))]),
        Piece(id="a", text="éd", logprobs=[logprob("é", -math.inf), logprob("d", -3.0)], finish="stop"),
    ]
    streamed, whole = (CompletionAnswer(HEAD, 1, logprobs=True, usage=False) for _ in range(2))
    assert streamed.opening() == b""
    parts = [parsed(streamed.part(0, piece))[0]["choices"][0] for piece in pieces]
    assert [part["logprobs"]["text_offset"] for part in parts] == [[0], [2, 3]]
    assert [part["finish_reason"] for part in parts] == [None, "stop"]
    for piece in pieces:
        whole.take(0, piece)
    (choice,) = json.loads(whole.document(USAGE))["choices"]
    assert choice["text"] == "abéd"
    assert choice["logprobs"] == {
        "tokens": ["ab", "é", "d"],
        "token_logprobs": [-1.0, -9999.0, -3.0],
        "top_logprobs": [{"c": -2.0, "ab": -1.0}, {"é": -9999.0}, {"d": -3.0}],
        "text_offset": [0, 2, 3],
    }


def test_streamed_completion_skips_empty_pieces() -> None:
    answer = CompletionAnswer(HEAD, 1, logprobs=False, usage=True)
    assert answer.part(0, Piece(id="a", tokens=1)) == b""
    (chunk,) = parsed(answer.part(0, Piece(id="a", text="x")))
    assert (chunk["usage"], chunk["choices"][0]["logprobs"], chunk["object"]) == (None, None, "text_completion")
    with pytest.raises(AppError):
        answer.closing(USAGE)
    answer.part(0, Piece(id="a", finish="stop"))
    (last,) = parsed(answer.closing(USAGE))
    assert (last["choices"], last["usage"]["prompt_tokens"]) == ([], 1)


def test_error_event() -> None:
    (error,) = parsed(error_event(ContextTooLong("too long", hint="less", param="messages", n_ctx=4)))
    assert error == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
            "hint": "less",
            "n_ctx": 4,
        }
    }
    assert "hint" not in parsed(error_event(AppError("x")))[0]["error"]


@pytest.mark.parametrize("kind", [ChatAnswer, CompletionAnswer])
def test_answer_has_no_fields_that_were_not_requested(kind: type[ChatAnswer | CompletionAnswer]) -> None:
    answer = kind(HEAD, 1, logprobs=False, usage=False)
    answer.take(0, Piece(id="a", text="t", logprobs=[logprob("t", -1.0)]))
    with pytest.raises(AppError, match="without a finish reason"):
        answer.document(USAGE)
    answer.take(0, Piece(id="a", finish="stop"))
    (choice,) = json.loads(answer.document(USAGE))["choices"]
    assert choice["logprobs"] is None


def token(raw: bytes, number: int, *top: PieceLogprob) -> PieceLogprob:
    """A token as the worker reports it."""
    text = raw.decode("utf-8", "replace")
    return PieceLogprob(token=text, id=number, bytes=list(raw), logprob=-float(number), top=list(top))


QUOTED = [
    Piece(id="a", text="a", logprobs=[token(b"a", 1)]),
    Piece(id="a", text="“", logprobs=[token(b"\xe2", 2), token(b"\x80", 3), token(b"\x9c", 4)]),
    Piece(id="a", text="b", logprobs=[]),
    Piece(id="a", text="c", logprobs=[token(b"bc", 5)], finish="stop"),
]
QUOTED_OFFSETS = [0, 1, 1, 1, 2]


@pytest.mark.parametrize("choices", [1, 2])
def test_text_offsets_of_characters_in_several_tokens(choices: int) -> None:
    streamed, whole = (CompletionAnswer(HEAD, choices, logprobs=True, usage=False) for _ in range(2))
    offsets: list[list[int]] = [[] for _ in range(choices)]
    for piece in QUOTED:
        for choice in range(choices):
            ((part,),) = (chunk["choices"] for chunk in parsed(streamed.part(choice, piece)))
            offsets[choice] += part["logprobs"]["text_offset"]
            whole.take(choice, piece)
    assert offsets == [QUOTED_OFFSETS] * choices
    for choice in json.loads(whole.document(USAGE))["choices"]:
        assert choice["text"] == "a“bc"
        assert choice["logprobs"]["text_offset"] == QUOTED_OFFSETS
        assert choice["logprobs"]["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x80", "bytes:\\x9c", "bc"]


def test_alternatives_with_equal_texts_do_not_merge() -> None:
    top = [token(b"\x9c", 1), token(b"\x9d", 2), token(b"x", 3), token(b"x", 4), token(b"\x80", 5)]
    answer = CompletionAnswer(HEAD, 1, logprobs=True, usage=False)
    answer.take(0, Piece(id="a", text="\ufffd", logprobs=[token(b"\x80", 6, *top)], finish="length"))
    (choice,) = json.loads(answer.document(USAGE))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [
        {
            "bytes:\\x9c": -1.0,
            "bytes:\\x9d": -2.0,
            "x": -3.0,
            "token_id:4": -4.0,
            "token_id:5": -5.0,
            "bytes:\\x80": -6.0,
        }
    ]


ODD_TEXTS = [b"x", b"", b"\x80", b"bytes:\\x80", b"token_id:0", b"token_id:1", b"token_id:2", b"token_id:token_id:1"]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("streams", [False, True])
def test_every_alternative_has_a_key(seed: int, streams: bool) -> None:
    """Several tokens with each text, also with texts that look like keys."""
    random = Random(seed)
    tokens = [token(random.choice(ODD_TEXTS), number) for number in range(20)]
    entries = [
        msgspec.structs.replace(sampled, top=random.sample(tokens, random.randrange(20)))
        for sampled in random.choices(tokens, k=5)
    ]
    answer = CompletionAnswer(HEAD, 1, logprobs=True, usage=False)
    piece = Piece(id="a", text="", logprobs=entries, finish="length")
    if streams:
        ((choice,),) = (chunk["choices"] for chunk in parsed(answer.part(0, piece)))
    else:
        answer.take(0, piece)
        (choice,) = json.loads(answer.document(USAGE))["choices"]
    for entry, report in zip(entries, choice["logprobs"]["top_logprobs"], strict=True):
        expected = {other.id: other.logprob for other in (*entry.top, entry)}
        assert sorted(report.values()) == sorted(expected.values())


def test_chat_spells_incomplete_characters_as_bytes() -> None:
    answer = ChatAnswer(HEAD, 1, logprobs=True, usage=False)
    (chunk,) = parsed(answer.part(0, Piece(id="a", text="\ufffd", logprobs=[token(b"\x80", 1, token(b"\x81", 2))])))
    (entry,) = chunk["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("bytes:\\x80", [0x80])
    assert entry["top_logprobs"] == [{"token": "bytes:\\x81", "logprob": -2.0, "bytes": [0x81]}]
