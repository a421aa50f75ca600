"""The spelling of tokens, and the offsets of tokens in the text of an answer."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from localllm.app.api.token_text import TextOffsets, spelling


def offsets(text: str, *tokens: bytes) -> list[int]:
    found = TextOffsets()
    found.add(text)
    return [found.of(token) for token in tokens]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"", ""),
        (b"a\\x", "a\\x"),
        ("é\n".encode(), "é\n"),
        ("\ufffd".encode(), "\ufffd"),
        (b"\xe2\x80", "bytes:\\xe2\\x80"),
        (b" \xf0\x9f", "bytes: \\xf0\\x9f"),
        (b"\\\xff\n", "bytes:\\x5c\\xff\\x0a"),
    ],
)
def test_spelling(raw: bytes, text: str) -> None:
    assert spelling(raw) == text


def test_different_bytes_have_different_spellings() -> None:
    tokens = [bytes([first, second]) for first in range(256) for second in range(256)]
    assert len({spelling(token) for token in tokens}) == len(tokens)


@pytest.mark.parametrize(
    ("text", "tokens", "expected"),
    [
        ("“x”", [b"\xe2", b"\x80", b"\x9c", b"x", b"\xe2\x80", b"\x9d"], [0, 0, 0, 1, 2, 2]),
        ("a—b", [b"a\xe2", b"\x80\x94b"], [0, 1]),
        ("😀😀", [b"\xf0\x9f", b"\x98\x80\xf0\x9f", b"\x98\x80"], [0, 0, 1]),
        ("e\u0302x", [b"e", b"\xcc", b"\x82", b"x"], [0, 1, 1, 2]),
        # a broken character
        ("\ufffda", [b"\xe2", b"\x80", b"a"], [0, 0, 1]),
        ("\ufffd\ufffda", [b"\xe2", b"\x80", b"a"], [0, 0, 2]),
        ("\ufffd\ufffd", [b"\xff", b"\xff"], [0, 1]),
        ("\ufffd", [b"\xe2", b"\x80"], [0, 0]),
        ("x\ufffd😀", [b"x", b"\xe2\x80", "😀".encode()], [0, 1, 2]),
        # tokens without text, a dropped space, a token that a stop string cuts
        ("ab", [b"<s>", b"a", b"<pad>", b"b", b"</s>"], [0, 0, 1, 1, 2]),
        ("ab c", [b" ab", b" c"], [0, 2]),
        ("ab", [b"a", b"bSTO", b"P"], [0, 1, 2]),
        ("", [b"STOP", b"x"], [0, 0]),
    ],
)
def test_offset_is_the_character_at_which_a_token_begins(
    text: str, tokens: Sequence[bytes], expected: list[int]
) -> None:
    assert offsets(text, *tokens) == expected


def test_text_may_arrive_before_its_token() -> None:
    """A possible start of a stop string holds a token back, but not the text before it."""
    found = TextOffsets()
    found.add("ab")
    found.add("")
    found.add("c—d")
    assert [found.of(raw) for raw in (b"abc", b"\xe2\x80", b"\x94d")] == [0, 3, 3]


@pytest.mark.parametrize("seed", range(200))
def test_offsets_of_any_bytes(seed: int) -> None:
    """The reference decodes the text up to the first byte of each token."""
    generator = random.Random(seed)
    letters = [*"aé—😀".encode(), 0xFF, 0xE2, 0x80, 0x20]
    raw = bytes(generator.choice(letters) for _ in range(generator.randint(1, 30)))
    if seed % 2:
        raw = "".join(generator.choices("aé—😀 \ufffd", k=20)).encode()
    cuts = sorted({0, *generator.sample(range(len(raw)), min(6, len(raw)))})
    tokens = [raw[start:end] for start, end in zip(cuts, [*cuts[1:], len(raw)], strict=True)]
    expected = [len(raw[: start + 1].decode("utf-8", "replace")) - 1 for start in cuts]
    assert offsets(raw.decode("utf-8", "replace"), *tokens) == expected
