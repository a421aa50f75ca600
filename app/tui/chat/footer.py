"""The last line of the chat: the keys that work now, as many as fit."""

from __future__ import annotations

from ..segments import Segment, SegmentLine

SCREENS = ((0, "F1 help"), (1, "F2 models"), (3, "F3 history"), (4, "F4 settings"), (5, "F5 adapters"))
REST = ((6, "Ctrl+N new"), (8, "Ctrl+R again"), (7, "Ctrl+P find"), (2, "Ctrl+Q quit"))
MESSAGE = (
    (0, "Esc back"),
    (1, "c copy"),
    (2, "r again"),
    (3, "e edit"),
    (4, "k copy code"),
    (5, "←/→ other answers"),
    (6, "↑/↓ messages"),
    (7, "Enter expand"),
)


def keys(*, is_answering: bool, is_message: bool, has_hints: bool, purpose: str) -> list[Segment]:
    """The keys as segments.

    `is_message`: a message has the focus. `has_hints`: completions are shown. `purpose`: a special purpose of the next
    prompt; empty: none.
    """
    if is_message:
        return list(MESSAGE)
    first: list[Segment] = []
    if has_hints:
        first = [(-3, "Tab completes"), (-2, "↑/↓ choose"), (-1, "Esc closes")]
    elif purpose:
        first = [(-2, f"Enter {purpose}"), (-1, "Esc cancels")]
    elif is_answering:
        first = [(-1, "Esc stop")]
    return [*first, *SCREENS, *REST]


class Footer(SegmentLine):
    """Shows keys."""
