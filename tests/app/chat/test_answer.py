from __future__ import annotations

from pathlib import Path

import pytest

from localllm.app.chat.answer import Choice, ReadingOptions
from localllm.app.chat.calls.records import FORMATS, REASONING
from localllm.app.chat.output.parser import AnswerFormat
from localllm.app.chat.prompt import Prompt
from localllm.app.chat.tokenizer.huggingface import ChatTokenizer
from localllm.app.frames import Piece
from localllm.engine.request import Delta, Finish, TokenLogprobs

from ..tiny_qwen import write_tokenizer
from .tokenizer.vocabularies import vocabulary

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
FORM = AnswerFormat(REASONING[0], FORMATS[:1])
CHAT = Prompt((1,), form=FORM)
TOOLS = ({"type": "function", "function": {"name": "f"}},)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def feed(
    choice: Choice, ids: list[int], finish: Finish | None = "stop", step: int = 1, logprobs: bool = False
) -> list[Piece]:
    """Feed the ids in deltas of `step` tokens. The last delta has `finish`."""
    pieces = []
    for start in range(0, len(ids), step):
        tokens = tuple(ids[start : start + step])
        probs = tuple(TokenLogprobs(token, -float(start + i), ((token, -0.5),)) for i, token in enumerate(tokens))
        last = start + step >= len(ids)
        delta = Delta("a/0", tokens, probs if logprobs else (), finish if last else None)
        pieces.append(choice.take(delta))
    return [piece for piece in pieces if piece is not None]


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("step", [1, 2, 7])
@pytest.mark.parametrize("text", ["hello world", "größer 🙂🙂 日本語", "<b> a </b>\n\n", "   "])
def test_text_equals_the_decoding_of_all_tokens(tokenizer: ChatTokenizer, text: str, step: int) -> None:
    ids = [*tokenizer.encode(text, add_special_tokens=False), 2]
    choice = Choice("a", 0, tokenizer, CHAT, ReadingOptions(tools=TOOLS), stop_ids=frozenset({2}))
    pieces = feed(choice, ids, step=step)
    assert text_of(pieces) == text
    assert [piece.finish for piece in pieces][-1] == "stop"
    assert all(piece.finish is None for piece in pieces[:-1])
    assert choice.done
    assert choice.generated == len(ids)
    assert sum(piece.tokens for piece in pieces) == len(ids) - 1


def test_an_answer_that_continues_the_prompt_keeps_its_first_space(tmp_path: Path) -> None:
    """A sentencepiece decoder drops the space of the first token of a text; the prompt before it prevents this."""
    words = vocabulary("llama", tmp_path)
    prompt, answer = (tuple(words.encode(text, add_special_tokens=False)) for text in ("the quick", "brown fox"))
    shown = [
        text_of(feed(Choice("a", 0, words, Prompt(prompt, continues_text=flag)), list(answer)))
        for flag in (True, False)
    ]
    assert shown == [" brown fox", "brown fox"]


def test_a_stop_string_may_span_tokens(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("one two three four", add_special_tokens=False)
    for step in (1, 2, 99):
        choice = Choice("a", 0, tokenizer, CHAT, ReadingOptions(stop=["wo th"], tools=TOOLS))
        pieces = feed(choice, ids, finish="length", step=step)
        assert text_of(pieces) == "one t"
        assert pieces[-1].finish == "stop"
        assert choice.take(Delta("a/0", (5,))) is None  # a delta of a step that was in flight


def test_a_length_limit_ends_an_incomplete_marker(tokenizer: ChatTokenizer) -> None:
    choice = Choice("a", 0, tokenizer, CHAT, ReadingOptions(tools=TOOLS))
    pieces = feed(choice, tokenizer.encode("one <tool", add_special_tokens=False), finish="length")
    assert text_of(pieces) == "one <tool"
    assert pieces[-1].finish == "length"


def test_special_tokens_are_hidden_and_markers_are_parsed(tokenizer: ChatTokenizer) -> None:
    output = f"<think>\nhm\n</think>\n\nSure.<|im_start|>{CALL}"
    choice = Choice("a", 0, tokenizer, CHAT, ReadingOptions(tools=TOOLS))
    pieces = feed(choice, tokenizer.encode(output, add_special_tokens=False))
    assert text_of(pieces) == "Sure."
    assert "".join(piece.reasoning for piece in pieces) == "hm"
    first, *others = [part for piece in pieces for part in piece.tool_calls]
    assert (first.index, first.name, first.id[:5]) == (0, "f", "call_")
    assert not any(part.id or part.name or part.index for part in others)
    assert first.arguments + "".join(part.arguments for part in others) == '{"a": 1}'
    assert pieces[-1].finish == "tool_calls"


def test_markers_are_text_after_a_raw_prompt(tokenizer: ChatTokenizer) -> None:
    output = f"<think>a</think>{CALL}"
    choice = Choice("a", 0, tokenizer, Prompt((1,)))
    assert text_of(feed(choice, tokenizer.encode(output, add_special_tokens=False))) == output


@pytest.mark.parametrize("step", [1, 5, 999])
def test_without_parallel_calls_the_first_call_ends_the_answer(tokenizer: ChatTokenizer, step: int) -> None:
    ids = tokenizer.encode(f"{CALL}\n{CALL}", add_special_tokens=False)
    several = feed(Choice("a", 0, tokenizer, CHAT, ReadingOptions(tools=TOOLS)), ids, step=step)
    assert len([call for piece in several for call in piece.tool_calls if call.id]) == 2
    choice = Choice("a", 0, tokenizer, CHAT, ReadingOptions(tools=TOOLS, one_call=True))
    pieces = feed(choice, ids, step=step)
    assert len([call for piece in pieces for call in piece.tool_calls if call.id]) == 1
    assert pieces[-1].finish == "tool_calls"
    assert choice.generated < len(ids) or step == 999


def test_logprobs_are_in_the_piece_with_their_text(tokenizer: ChatTokenizer) -> None:
    ids = [*tokenizer.encode("größer 🙂 END more", add_special_tokens=False)]
    choice = Choice("a", 0, tokenizer, CHAT, ReadingOptions(stop=["END"], tools=TOOLS))
    pieces = feed(choice, ids, finish="length", logprobs=True)
    entries = [entry for piece in pieces for entry in piece.logprobs]
    assert [entry.id for entry in entries] == ids[: len(entries)]
    assert [entry.logprob for entry in entries] == [-float(index) for index in range(len(entries))]
    assert b"".join(bytes(entry.bytes) for entry in entries).decode().startswith(text_of(pieces))
    assert all(len(piece.logprobs) == piece.tokens for piece in pieces)
    assert entries[0].top[0].id == ids[0]


def test_a_token_with_waiting_text_is_not_reported_yet(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("the lazy dog", add_special_tokens=False)
    choice = Choice("a", 0, tokenizer, CHAT, ReadingOptions(stop=["y!"], tools=TOOLS))
    pieces = feed(choice, ids, finish="length", logprobs=True)
    assert any(piece.text and not piece.tokens for piece in pieces)
    assert all(len(piece.logprobs) == piece.tokens for piece in pieces)
    assert text_of(pieces) == "the lazy dog"


def test_the_last_piece_reports_the_waiting_tokens(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("the lazy dog", add_special_tokens=False)
    choice = Choice("a", 0, tokenizer, CHAT, ReadingOptions(stop=["dog!"], tools=TOOLS))
    assert (choice.generated, choice.cached) == (0, 0)
    pieces = feed(choice, ids, finish="length", logprobs=True)
    assert text_of(pieces) == "the lazy dog"
    assert [entry.id for entry in pieces[-1].logprobs][-1] == ids[-1]
    assert sum(piece.tokens for piece in pieces) == sum(len(piece.logprobs) for piece in pieces) == len(ids)


def test_tokens_after_the_only_call_are_not_reported(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode(f"{CALL} dog", add_special_tokens=False)
    choice = Choice("a", 0, tokenizer, CHAT, ReadingOptions(stop=["dog!"], tools=TOOLS, one_call=True))
    (piece,) = feed(choice, ids, step=999, logprobs=True)
    assert piece.finish == "tool_calls"
    assert piece.tokens == len(piece.logprobs) < len(ids)


def test_a_stop_token_has_no_logprob(tokenizer: ChatTokenizer) -> None:
    ids = [*tokenizer.encode("hi", add_special_tokens=False), 2]
    choice = Choice("a", 0, tokenizer, CHAT, ReadingOptions(tools=TOOLS), stop_ids=frozenset({2}))
    pieces = feed(choice, ids, logprobs=True)
    assert sum(len(piece.logprobs) for piece in pieces) == len(ids) - 1
