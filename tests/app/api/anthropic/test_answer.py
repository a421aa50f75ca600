"""Messages of Anthropic's API from the pieces of an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localllm.app.api.answers import Head
from localllm.app.api.anthropic.answer import MessageAnswer
from localllm.app.api.replies import UsageReport
from localllm.app.errors import AppError, Overloaded
from localllm.app.frames import Piece, ToolCallPiece

from ...daemon.conftest import events


def answered(*pieces: Piece, tokens: int = 2) -> tuple[dict[str, Any], list[Any]]:
    """The document and the events of an answer with a limit of 5 tokens."""
    usage = UsageReport(prompt_tokens=3, completion_tokens=tokens)
    whole, streamed = (MessageAnswer(Head("msg_1", "m", "f", prompt_tokens=3), 5) for _ in range(2))
    data = streamed.opening()
    for piece in pieces:
        whole.take(0, piece)
        data += streamed.part(0, piece)
    data += streamed.closing(usage)
    names = [line[7:] for line in data.decode().splitlines() if line.startswith("event: ")]
    assert names == [event["type"] for event in events(data.decode())]
    return json.loads(whole.document(usage)), events(data.decode())


@pytest.mark.parametrize(
    ("piece", "tokens", "reason", "sequence"),
    [
        (Piece(id="a", text="x", finish="stop"), 2, "end_turn", None),
        (Piece(id="a", text="x", finish="stop", stop="END"), 2, "stop_sequence", "END"),
        (Piece(id="a", text="x", finish="length"), 5, "max_tokens", None),
        (Piece(id="a", text="x", finish="length"), 2, "model_context_window_exceeded", None),
    ],
)
def test_reasons_of_the_end(piece: Piece, tokens: int, reason: str, sequence: str | None) -> None:
    whole, streamed = answered(piece, tokens=tokens)
    ending = {"stop_reason": reason, "stop_sequence": sequence}
    assert whole | ending == whole
    assert streamed[-2]["delta"] == ending


def test_blocks_follow_each_other() -> None:
    call = [
        ToolCallPiece(index=0, id="c", name="f"),
        ToolCallPiece(index=0, arguments='{"a":'),
        ToolCallPiece(index=0, arguments="1}"),
    ]
    whole, streamed = answered(
        Piece(id="a", reasoning="hm"),
        Piece(id="a", reasoning="!", text="I ", tool_calls=call[:1]),
        Piece(id="a", tool_calls=call[1:], text=""),
        Piece(id="a", text="more", finish="tool_calls"),
    )
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "text"]
    assert whole["content"][2]["input"] == {"a": 1}
    order = [(event["type"].removeprefix("content_block_"), event["index"]) for event in streamed[1:-2]]
    assert order == [
        *[("start", 0), ("delta", 0), ("delta", 0), ("delta", 0), ("stop", 0)],
        *[("start", 1), ("delta", 1), ("stop", 1)],
        *[("start", 2), ("delta", 2), ("delta", 2), ("stop", 2)],
        *[("start", 3), ("delta", 3), ("stop", 3)],
    ]


def test_a_call_that_is_cut_is_no_block_of_the_document() -> None:
    cut = Piece(id="a", tool_calls=[ToolCallPiece(index=0, id="c", name="f", arguments='{"a":')], finish="length")
    whole, streamed = answered(cut, tokens=5)
    assert (whole["content"], whole["stop_reason"]) == ([], "max_tokens")
    assert streamed[2]["delta"] == {"type": "input_json_delta", "partial_json": '{"a":'}


def test_failures() -> None:
    answer = MessageAnswer(Head("msg_1", "m", "f"), 5)
    (failure,) = events(answer.failure(Overloaded("busy", hint="wait")).decode())
    assert failure == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "busy", "code": "server_overloaded", "hint": "wait"},
    }
    with pytest.raises(AppError, match="without a finish reason"):
        answer.closing(UsageReport())
    assert events(answer.framing.idle.decode()) == [{"type": "ping"}]
