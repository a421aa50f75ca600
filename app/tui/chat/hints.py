"""Completions of a typed command, above the prompt box."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from ..text import one_line

MAX_WIDTH = 28  # maximum width of the column of completions in characters


class Hints(OptionList, can_focus=False):
    """The list of completions. Hidden if empty. The prompt box has the focus, and moves the highlight of the list."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._completions: list[str] = []
        self.display = False

    def show(self, hints: list[tuple[str, str]]) -> None:
        completions = [text for text, _ in hints]
        self.display = bool(hints)
        if completions == self._completions:
            return
        self._completions = completions
        self.clear_options()
        width = min(MAX_WIDTH, max(map(len, completions), default=0))
        for text, sentence in hints:
            column = one_line(text, width).ljust(width + 2)
            self.add_option(Option(Content.assemble((column, "bold"), (sentence, "dim"))))
        self.highlighted = 0 if hints else None

    @property
    def completion(self) -> str | None:
        """The highlighted completion; None if the list is hidden."""
        if self.highlighted is None or not self.display:
            return None
        return self._completions[self.highlighted]
