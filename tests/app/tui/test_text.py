"""Text of a model cannot control the terminal, hide text or reorder it."""

from __future__ import annotations

import pytest

from localllm.app.errors import StorageFailed
from localllm.app.tui.text import clean, explain, fold, is_long, one_line, visible


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b[31mred\x1b[0m", "[31mred[0m"),
        ("\x1b]52;c;aGk=\x07", "]52;c;aGk="),  # sets the clipboard
        ("\x1b]0;title\x1b\\", "]0;title\\"),
        ("\x1bPq#0\x1b\\", "Pq#0\\"),  # sixel picture
        ("\x9b31mred", "31mred"),  # one-byte CSI
        ("\x90q\x9c", "q"),
        ("over\rwrite", "overwrite"),
        ("bell\x07 back\x08 null\x00 delete\x7f", "bell back null delete"),
        ("\x0e\x0fshift", "shift"),
        ("dos\r\nlines", "dos\nlines"),
        ("a\u2028b\u2029c\x85d\x0be\x0cf\x1cg", "a\nb\ncdefg"),
        ("half a \ud83d pair", "half a \ufffd pair"),
        ("\u202egnp.exe", "⟨U+202E⟩gnp.exe"),
        ("a\u2066b\u2069", "a⟨U+2066⟩b⟨U+2069⟩"),
        ("\U000e0041", "⟨U+E0041⟩"),
        ("مرحبا \u200fשלום", "مرحبا \u200fשלום"),
        ("[bold]markup[/bold]", "[bold]markup[/bold]"),
    ],
)
def test_visible(raw: str, expected: str) -> None:
    assert visible(raw) == expected
    assert all(ord(letter) >= 32 or letter in "\n\t" for letter in visible(raw))


def test_clean_works_on_parts_of_a_stream() -> None:
    text = "a\x1b[2J\x1b]52;c;QQ==\x07b\x9b1m"
    assert "".join(clean(letter) for letter in text) == clean(text)


def test_clean_removes_every_control_character() -> None:
    controls = "".join(map(chr, [*range(32), *range(127, 160)]))
    assert clean(controls) == "\t\n"


def test_one_line() -> None:
    assert one_line(" a\n\tb  c ") == "a b c"
    assert one_line("x" * 100, 10) == "x" * 9 + "…"


def test_fold_and_is_long() -> None:
    assert fold("short\ntext") == ("short\ntext", 0)
    head, left = fold("line\n" * 100)
    assert (head.count("\n"), left) == (11, 500 - len(head))
    assert [is_long(text) for text in ("a" * 4000, "a" * 4001, "\n" * 39, "\n" * 40)] == [False, True, False, True]


def test_explained_error_has_sentences() -> None:
    assert explain(StorageFailed("no space\x1b[2J", hint="free 2 GiB.")) == "No space[2J. Free 2 GiB."
    assert explain(StorageFailed("")) == ""
