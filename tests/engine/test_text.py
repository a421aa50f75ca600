from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.engine.text import MAX_WINDOW, StopFilter, TextStream

Decode = Callable[[Sequence[int]], str]


class TextChunk(NamedTuple):
    """New text, and the number of tokens that it completes."""

    text: str
    tokens: int


class Reader:
    """A stream and its stop strings, as the reader of an answer uses them."""

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._stream = TextStream(decode)
        self._stops = StopFilter(stop)

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    def push(self, tokens: Sequence[int]) -> TextChunk:
        text = ""
        count = 0
        for token in tokens:
            if not self.stopped:
                text += self._stops.feed(self._stream.push([token]))
                count += self._stream.settle(self._stops.held)
        return TextChunk(text, count)

    def finish(self) -> TextChunk:
        text = "" if self.stopped else self._stops.feed(self._stream.finish()) + self._stops.finish()
        return TextChunk(text, self._stream.settle())


LONGER = (b" the", b"\xf0\x9f", b"\x98\x80a", b"\xe4\xbd\xa0\xe5")  # tokens of several bytes, whole characters or not


def decode_bytes(tokens: Sequence[int]) -> str:
    """The plainest byte-level decoder: a token is a byte."""
    return bytes(tokens).decode("utf-8", "replace")


@cache
def byte_level() -> tuple[Decode, Callable[[bytes], list[int]]]:
    """`tokenizers`' own byte-level decoder, with single bytes and a few longer tokens; and bytes -> tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's bytes_to_unicode
    others = [byte for byte in range(256) if byte not in printable]
    letter = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    assert sorted(letter.values()) == alphabet
    longer = [
        "".join(letter[byte] for byte in text) for text in (b" the", b"\xf0\x9f", b"\x98\x80a", b"\xe4\xbd\xa0\xe5")
    ]
    vocabulary = {text: index for index, text in enumerate([letter[byte] for byte in range(256)] + longer)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()

    def encode(text: bytes) -> list[int]:
        tokens, at = [], 0
        while at < len(text):
            for index, piece in enumerate(LONGER):
                if text.startswith(piece, at):
                    tokens.append(256 + index)
                    at += len(piece)
                    break
            else:
                tokens.append(text[at])
                at += 1
        return tokens

    return tokenizer.decode, encode


def stream(
    tokens: Sequence[int], decode: Decode = decode_bytes, stop: Sequence[str] = (), at_once: int = 1
) -> list[TextChunk]:
    text = Reader(decode, stop)
    pieces = [text.push(tokens[at : at + at_once]) for at in range(0, len(tokens), at_once)]
    return [*pieces, text.finish()]


def joined(pieces: list[TextChunk]) -> str:
    return "".join(piece.text for piece in pieces)


TEXTS = st.text(st.sampled_from("ab ë你好😀👍🏽\u0301\ufffd\n\U0010ffff"), max_size=12).map(str.encode)
BYTES = st.lists(st.one_of(TEXTS, st.binary(max_size=6), st.sampled_from(LONGER))).map(b"".join)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(BYTES, st.integers(1, 5))
def test_chunks_equal_the_full_text_and_count_every_token(text: bytes, at_once: int) -> None:
    pieces = stream(text, at_once=at_once)
    assert joined(pieces) == decode_bytes(text)
    assert sum(piece.tokens for piece in pieces) == len(text)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(BYTES)
def test_chunks_equal_the_full_text_of_a_real_decoder(text: bytes) -> None:
    decode, encode = byte_level()
    tokens = encode(text)
    pieces = stream(tokens, decode)
    assert joined(pieces) == decode(tokens)
    assert sum(piece.tokens for piece in pieces) == len(tokens)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text("ab😀é", max_size=30))
def test_a_character_is_never_split_nor_later_than_its_last_byte(text: str) -> None:
    pieces = stream(text.encode())
    shown = ""
    for count, piece in enumerate(pieces[:-1], start=1):
        shown += piece.text
        assert shown == text.encode()[:count].decode("utf-8", "ignore")
    assert pieces[-1] == TextChunk("", 0)


def reference(text: str, stops: Sequence[str]) -> str:
    """Cut where the first stop string to end ends, before the longest that ends there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@settings(max_examples=600, deadline=None, derandomize=True)
@given(
    st.text("ab😀", max_size=40),
    st.lists(st.text("ab😀", min_size=1, max_size=5), max_size=4),
    st.integers(1, 7),
)
def test_stop_strings_with_any_tokens(text: str, stops: list[str], at_once: int) -> None:
    tokens = text.encode()
    stream = Reader(decode_bytes, stops)
    shown, counted = "", 0
    for at in range(0, len(tokens), at_once):
        piece = stream.push(tokens[at : at + at_once])
        shown, counted = shown + piece.text, counted + piece.tokens
        cut = reference(tokens[: at + at_once].decode("utf-8", "ignore"), stops)
        assert cut.startswith(shown)
        held = cut[len(shown) :]
        assert stream.stopped or held == "" or any(stop.startswith(held) for stop in stops), "held back without need"
        assert stream.stopped or counted == len(shown.encode())
        if stream.stopped:
            break
    last = stream.finish()
    assert shown + last.text == reference(text, stops)
    assert stream.stopped == (reference(text, stops) != text)
    if not stream.stopped:
        assert counted + last.tokens == len(tokens)


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("one two STOP three", ["STOP"], "one two "),
        ("STOP", ["STOP"], ""),
        ("no stop here STO", ["STOP"], "no stop here STO"),
        ("aaab", ["aab"], "a"),
        ("abcabcabd", ["abcabd"], "abc"),
        ("xabcd", ["abcd", "bc"], "xa"),
        ("xabc", ["c", "bc", "abc"], "x"),
        ("anything", ["", "thing"], "any"),
        ("日本語。終", ["。"], "日本語"),
    ],
)
def test_stop_strings(text: str, stops: list[str], shown: str) -> None:
    for at_once in (1, 2, 100):
        assert joined(stream(text.encode(), stop=stops, at_once=at_once)) == shown


def test_the_chunk_with_the_stop_counts_all_tokens_before() -> None:
    text = Reader(decode_bytes, ["END"])
    assert [text.push([byte]) for byte in b"aENE"] == [
        TextChunk("a", 1),
        TextChunk("", 0),
        TextChunk("", 0),
        TextChunk("EN", 2),
    ]
    assert text.push(b"ND after") == TextChunk("", 3)
    assert text.stopped
    assert text.push(b"more") == TextChunk("", 0)
    assert text.finish() == TextChunk("", 0)


def test_broken_bytes_come_out_at_the_fourth() -> None:
    text = Reader(decode_bytes)
    pieces = [text.push([0x80]) for _ in range(100)]
    assert [piece.text for piece in pieces[:3]] == ["", "", ""]
    assert all(piece == TextChunk("\ufffd", 1) for piece in pieces[3:])
    assert text.finish().text == "\ufffd" * 3


def test_a_character_after_broken_bytes_is_complete() -> None:
    for broken in range(60):
        tokens = b"\x80" * broken + "😀".encode()
        assert joined(stream(tokens)) == "\ufffd" * broken + "😀"


def test_the_decoder_only_ever_sees_a_short_window() -> None:
    longest = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode_bytes(tokens)

    stream(b"plain text, " * 50 + b"\x80\xf0\x9f" * 200 + "你好".encode() * 200 + b"\xf0" * 100, decode)
    assert longest <= 2 * MAX_WINDOW + 2


def decode_sentences(tokens: Sequence[int]) -> str:
    """As sentencepiece does it: the first token loses its leading space; 0 is a special token without text."""
    words = ["", " one", " two", "three", " "]
    return "".join(words[token] for token in tokens).removeprefix(" ")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 4), max_size=30))
def test_decoders_that_look_at_the_first_token(tokens: list[int]) -> None:
    assert joined(stream(tokens, decode_sentences)) == decode_sentences(tokens)


def test_tokens_without_text_are_counted_and_do_not_pile_up() -> None:
    text = Reader(decode_sentences)
    assert text.push([1]) == TextChunk("one", 1)
    assert text.push([0] * 100) == TextChunk("", 100)
    assert text.push([2]) == TextChunk(" two", 1)


def test_the_window_of_an_inconsistent_decoder_is_shortened() -> None:
    def decode(tokens: Sequence[int]) -> str:
        return f"{len(tokens)}" + "\ufffd" * len(tokens)

    text = Reader(decode)
    pieces = [text.push([1]) for _ in range(100)]
    assert sum(piece.tokens for piece in pieces) > 60
