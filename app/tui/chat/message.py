"""One message on the screen: a question as plain text, an answer as Markdown that grows while it streams."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.message import Message as Event
from textual.widgets import Markdown, Static

from ..conversation import Message
from ..text import fold, one_line, visible
from .growing import GrowingMarkdown

UNFOLDED = 60_000  # characters of a question shown at most; copy and export have all of it
_ENDS = {"stopped": "stopped", "length": "cut off: the token limit was reached", "tool_calls": "called a tool"}


class MessageView(Vertical, can_focus=True):
    """Keys on a focused message arrive at the screen as `Asked`."""

    BINDINGS = [
        Binding("e", "ask('edit')", "Edit"),
        Binding("r", "ask('regenerate')", "Again"),
        Binding("c", "ask('copy')", "Copy"),
        Binding("k", "ask('copy_code')", "Copy code"),
        Binding("left", "ask('earlier')", "Earlier"),
        Binding("right", "ask('later')", "Later"),
        Binding("up", "ask('up')", "Up"),
        Binding("down", "ask('down')", "Down"),
        Binding("enter,space", "unfold", "Unfold"),
    ]

    class Asked(Event):
        """A key asks for something to be done with this message."""

        def __init__(self, message: Message, wish: str) -> None:
            super().__init__()
            self.message, self.wish = message, wish

    def __init__(self, message: Message, place: tuple[int, int]) -> None:
        """`place`: this is the n-th of m alternatives."""
        super().__init__(classes=message.role)
        self.message, self.place = message, place
        self._unfolded = False

    def compose(self) -> ComposeResult:
        yield Static(self._who(), classes="who", markup=False)
        yield Static("", classes="reasoning", markup=False)
        if self.message.role == "user":
            yield Static(self._question(), classes="question", markup=False)
        else:
            yield GrowingMarkdown(visible(self.message.content))
        yield Static("", classes="note", markup=False)

    def on_mount(self) -> None:
        self.settle(self.place)

    def grow(self, part: str, text: str) -> None:
        """Show an addition to the running answer."""
        if part == "text":
            self.query_one(GrowingMarkdown).write(visible(text))
        else:
            self._show_reasoning()

    async def end(self) -> None:
        """Show everything that is still on its way, and how the answer ended."""
        await self.query_one(GrowingMarkdown).end()
        self.settle(self.place)

    def settle(self, place: tuple[int, int]) -> None:
        """Show how the message stands now: its alternatives, its end, its error."""
        self.place = place
        self.query_one(".who", Static).update(self._who())
        note = self.query_one(".note", Static)
        words = self._note()
        note.update(words)
        note.display = bool(words)
        self.set_class(self.message.finish == "failed", "failed")
        self._show_reasoning()

    def action_ask(self, wish: str) -> None:
        self.post_message(self.Asked(self.message, wish))

    def action_unfold(self) -> None:
        self._unfolded = not self._unfolded
        if self.message.role == "user":
            self.query_one(".question", Static).update(self._question())
        self._show_reasoning()

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        """A link of a model is shown and copied, never opened: its text may hide where it leads."""
        event.stop()
        self.app.copy_to_clipboard(event.href)
        self.app.notify(visible(event.href)[:300], title="Link copied", markup=False)

    def _who(self) -> str:
        place, count = self.place
        name = "You" if self.message.role == "user" else one_line(self.message.model, 40)
        return f"{name}  ‹{place}/{count}›" if count > 1 else name

    def _question(self) -> str:
        head, left = fold(self.message.content)
        if not left:
            return visible(self.message.content)
        if not self._unfolded:
            return f"{visible(head)}\n… {left:,} more characters (Enter on this message unfolds)"
        rest = len(self.message.content) - UNFOLDED
        return visible(self.message.content[:UNFOLDED]) + (f"\n… {rest:,} more: copy or /export" if rest > 0 else "")

    def _show_reasoning(self) -> None:
        reasoning = self.query_one(".reasoning", Static)
        text = self.message.reasoning
        reasoning.display = bool(text)
        if not text:
            return
        if self._unfolded:
            words = visible(text[:UNFOLDED])
        elif self.message.finish or self.message.content:
            words = f"Thought in {len(text.split()):,} words (Enter on this message unfolds)"
        else:
            words = visible("\n".join(text[-600:].split("\n")[-4:]))
        reasoning.update(words)

    def _note(self) -> str:
        message = self.message
        if message.role == "user":
            return ""
        if not message.finish:
            return "" if message.content else "…"
        if message.finish == "failed":
            left_out = "" if message.content else " Later answers leave this turn out."
            return f"{message.error}\nCtrl+R tries again.{left_out}"
        if message.finish == "stopped" and not message.content:
            return "stopped before the first word; later answers leave this turn out"
        return _ENDS.get(message.finish, "" if message.content else "an empty answer")
