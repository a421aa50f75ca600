"""The messages of the visible path."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from ..conversation import Conversation, Message
from .message import MessageView

WINDOW = 16  # number of messages mounted first; earlier ones on demand, so that long conversations open fast


class Earlier(Static, can_focus=True):
    BINDINGS = [("enter,space", "screen.show_earlier", "Show earlier messages")]

    def on_click(self) -> None:
        self.screen.action_show_earlier()  # type: ignore[attr-defined]


class Messages(VerticalScroll, can_focus=False):
    """Scrolls with the newest text until the user scrolls up."""

    def __init__(self) -> None:
        super().__init__()
        self._window = WINDOW
        self._shown: str = ""

    def compose(self) -> ComposeResult:
        yield Static(id="welcome")
        yield Earlier(id="earlier", markup=False)

    def on_mount(self) -> None:
        self.anchor()

    def welcome(self, text: Content) -> None:
        self.query_one("#welcome", Static).update(text)

    async def show(self, conversation: Conversation, *, more: bool = False) -> None:
        """Show the visible path. Reuses existing views."""
        if conversation.id != self._shown:
            self._shown = conversation.id
            self._window = WINDOW
        if more:
            self._window += WINDOW
        path = conversation.path()
        hidden = max(0, len(path) - self._window)
        self.query_one("#welcome").display = not path
        earlier = self.query_one("#earlier", Earlier)
        earlier.display = hidden > 0
        earlier.update(f"{hidden} earlier messages · Enter to show")
        visible = path[hidden:]
        views = {id(view.message): view for view in self.query(MessageView)}
        keep = {id(message) for message in visible}
        with self.app.batch_update():
            await self.remove_children([view for key, view in views.items() if key not in keep])
            before: Static | MessageView = earlier
            for message in visible:
                place = _place(conversation, message)
                view = views.get(id(message))
                if view is None:
                    view = MessageView(message, place)
                    await self.mount(view, after=before)
                else:
                    view.settle(place)
                before = view
        if not more:
            self.anchor()

    def view(self, message: Message) -> MessageView | None:
        """The view of a message, or None if it is not mounted."""
        return next((view for view in self.query(MessageView) if view.message is message), None)

    def step(self, message: Message | None, by: int) -> bool:
        """Move the focus by `by` messages from `message` (None: from below the last). False: no such message."""
        views = list(self.query(MessageView))
        index = next((i for i, view in enumerate(views) if view.message is message), len(views)) + by
        if not 0 <= index < len(views):
            return False
        views[index].focus()
        return True


def _place(conversation: Conversation, message: Message) -> tuple[int, int]:
    alternatives = conversation.alternatives(message)
    return next(i for i, other in enumerate(alternatives, 1) if other is message), len(alternatives)
