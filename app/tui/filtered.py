"""A list below a filter line: typed characters change the filter, so commands need Ctrl."""

from __future__ import annotations

from textual import events
from textual.content import Content
from textual.fuzzy import Matcher
from textual.widgets import Input, OptionList


class FilterLine(Input):
    """The line above a list. Down goes to the list."""

    def __init__(self, value: str = "", *, placeholder: str) -> None:
        super().__init__(value, placeholder=placeholder, select_on_focus=False)
        self.cursor_blink = False

    def on_key(self, event: events.Key) -> None:
        if event.key == "down":
            event.stop()
            self.screen.query_one(FilteredList).focus()


class FilteredList(OptionList):
    """The list. Typed characters and Backspace go to the filter line."""

    def on_key(self, event: events.Key) -> None:
        is_text = event.is_printable and event.character
        if not is_text and event.key != "backspace":
            return
        event.stop()
        line = self.screen.query_one(FilterLine)
        line.focus()
        line.cursor_position = len(line.value)
        if is_text:
            line.insert_text_at_cursor(event.character or "")
        else:
            line.action_delete_left()


def marked(name: str, matcher: Matcher) -> Content:
    """The name with the matching characters marked. Matcher.highlight would parse it as markup."""
    content = Content(name)
    _, offsets = matcher.fuzzy_search.match(matcher.query, name)
    for offset in offsets:
        content = content.stylize(matcher.match_style, offset, offset + 1)
    return content
