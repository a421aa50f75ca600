"""Text from models, files and pastes made safe to show, and text made short enough to show.

A terminal obeys what it is sent. Everything that reaches the screen, the history, the clipboard or an export
passes `clean` first, so no model can move the cursor, set the clipboard or hide what it says.
"""

from __future__ import annotations

import re

# C0 but tab and newline, DEL, C1: every terminal command starts with one of them (ESC is C0).
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Other line breaks: str.splitlines sees them and Markdown does not, so line counts would disagree.
_LINE_BREAKS = re.compile("\r\n|[\u2028\u2029]")
_SURROGATES = re.compile("[\ud800-\udfff]")  # cannot be written as UTF-8
# Reordering of what is read (embeddings, overrides, isolates) and invisible tag characters.
_DISGUISES = re.compile("[\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]")

FOLD_LINES = 12
FOLD_CHARACTERS = 2_000
PASTE_LINES = 40
PASTE_CHARACTERS = 4_000


def clean(text: str) -> str:
    """Without control characters (newline and tab stay) and lone surrogates. Works piece by piece of a stream."""
    text = _LINE_BREAKS.sub("\n", text)
    return _SURROGATES.sub("\ufffd", _CONTROLS.sub("", text))


def visible(text: str) -> str:
    """Clean text with characters that reorder or hide text written as ⟨U+202E⟩."""
    return _DISGUISES.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", clean(text))


def one_line(text: str, width: int = 60) -> str:
    """Visible text on one line, cut with an ellipsis at `width` characters."""
    line = " ".join(visible(text[: width * 8]).split())
    return line if len(line) <= width else line[: width - 1].rstrip() + "…"


def is_long(text: str) -> bool:
    """A paste of this size is kept beside the prompt box, not in it."""
    return len(text) > PASTE_CHARACTERS or text.count("\n") >= PASTE_LINES


def fold(text: str) -> tuple[str, int]:
    """The beginning of a long text and how many characters were left out (0: it is all there)."""
    head = "\n".join(text.split("\n", FOLD_LINES)[:FOLD_LINES])[:FOLD_CHARACTERS]
    return head, len(text) - len(head)
