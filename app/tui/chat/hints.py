"""Completions of a typed command, above the prompt box."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from ..text import one_line


class Hints(OptionList, can_focus=False):
    """The list of completions. Hidden if empty. The prompt box has the focus and moves the highlight."""

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
        width = min(28, max((len(text) for text in completions), default=0))
        self.add_options(
            Option(Content.assemble((one_line(text, width).ljust(width + 2), "bold"), (sentence, "dim")))
            for text, sentence in hints
        )
        self.highlighted = 0 if hints else None

    @property
    def completion(self) -> str | None:
        return None if self.highlighted is None or not self.display else self._completions[self.highlighted]
