"""Sanitises and shortens text from models, files and pastes.

A terminal executes control sequences in text. All text for the screen, the history, the clipboard or an export passes
`clean`, so a model cannot move the cursor, set the clipboard or hide text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..errors import AppError

# C0 without tab and newline, DEL, C1: every control sequence starts with one of them (ESC is in C0).
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Line breaks that `clean` replaces by a newline: Markdown does not split lines at U+2028, but str.splitlines does.
_LINE_BREAKS = re.compile("\r\n|[\u2028\u2029]")
_SURROGATES = re.compile("[\ud800-\udfff]")  # these characters have no UTF-8 encoding
# Characters that reorder text (embeddings, overrides, isolates), and invisible tag characters.
_DISGUISES = re.compile("[\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]")

FOLD_LINES = 12
FOLD_CHARACTERS = 2_000
PASTE_LINES = 40
PASTE_CHARACTERS = 4_000


def clean(text: str) -> str:
    """The text without control characters (except newline and tab) and lone surrogates. Works on parts of a stream."""
    text = _LINE_BREAKS.sub("\n", text)
    return _SURROGATES.sub("\ufffd", _CONTROLS.sub("", text))


def visible(text: str) -> str:
    """Clean text, with characters that reorder or hide text replaced by their code, e.g. ⟨U+202E⟩."""
    return _DISGUISES.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", clean(text))


def one_line(text: str, width: int = 60) -> str:
    """Visible text on one line, truncated to `width` characters with an ellipsis."""
    line = " ".join(visible(text[: width * 8]).split())
    return line if len(line) <= width else line[: width - 1].rstrip() + "…"


def joined(texts: Iterable[str]) -> str:
    """The texts that are not empty, on one line."""
    return " · ".join(text for text in texts if text)


def phrase(form: str, value: object) -> str:
    """`form` with the value in it; empty if the value is unknown or absent: 0, None, False or empty."""
    return form.format(value) if value else ""


def first_texts(texts: Sequence[str], limit: int) -> str:
    """The first texts, separated by commas, and the number of the others."""
    more = len(texts) - limit
    return ", ".join(texts[:limit]) + phrase(" and {} more", max(0, more))


def explain(error: AppError) -> str:
    """An error as sentences for the user: message and hint."""
    texts = [text for text in (error.message, error.hint) if text]
    return visible(" ".join(f"{text[0].upper()}{text[1:].rstrip('.')}." for text in texts))


def is_long(text: str) -> bool:
    """True if a paste is too long for the prompt box, which then shows a placeholder."""
    return len(text) > PASTE_CHARACTERS or text.count("\n") >= PASTE_LINES


def fold(text: str) -> tuple[str, int]:
    """The start of a long text, and the number of omitted characters."""
    head = "\n".join(text.split("\n", FOLD_LINES)[:FOLD_LINES])[:FOLD_CHARACTERS]
    return head, len(text) - len(head)
