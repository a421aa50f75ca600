"""The messages of the shown path, the newest in sight."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from ..conversation import Conversation, Message
from .message import MessageView

WINDOW = 16  # messages mounted at first; earlier ones on demand, so that long conversations open at once


class Earlier(Static, can_focus=True):
    BINDINGS = [("enter,space", "screen.show_earlier", "Show earlier messages")]

    def on_click(self) -> None:
        self.screen.action_show_earlier()  # type: ignore[attr-defined]


class Messages(VerticalScroll, can_focus=False):
    """Follows the newest text until the person scrolls away."""

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
        """Show the conversation's path, keeping the views that are still right."""
        if conversation.id != self._shown:
            self._shown, self._window = conversation.id, WINDOW
        if more:
            self._window += WINDOW
        path = conversation.path()
        hidden = max(0, len(path) - self._window)
        self.query_one("#welcome").display = not path
        earlier = self.query_one("#earlier", Earlier)
        earlier.display = hidden > 0
        earlier.update(f"{hidden} earlier messages · Enter shows them")
        wanted = path[hidden:]
        views = {id(view.message): view for view in self.query(MessageView)}
        keep = {id(message) for message in wanted}
        with self.app.batch_update():
            await self.remove_children([view for key, view in views.items() if key not in keep])
            before: Static | MessageView = earlier
            for message in wanted:
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
        """The view of a message, if it is on the screen."""
        return next((view for view in self.query(MessageView) if view.message is message), None)

    def step(self, message: Message | None, by: int) -> bool:
        """Focus the message `by` places from this one (None: from below the last). False: there is none."""
        views = list(self.query(MessageView))
        at = next((i for i, view in enumerate(views) if view.message is message), len(views)) + by
        if not 0 <= at < len(views):
            return False
        views[at].focus()
        return True


def _place(conversation: Conversation, message: Message) -> tuple[int, int]:
    alternatives = conversation.alternatives(message)
    return next(i for i, other in enumerate(alternatives, 1) if other is message), len(alternatives)
