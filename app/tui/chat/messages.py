"""Shows the messages of the current branch of a conversation."""

from __future__ import annotations

import asyncio

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from ..conversation import Conversation, Message
from .message import MessageView

WINDOW = 16  # number of messages shown at first (earlier ones on demand), so that a long conversation opens fast


class Earlier(Static, can_focus=True):
    BINDINGS = [("enter,space", "screen.show_earlier", "Show earlier messages")]

    def on_click(self) -> None:
        self.screen.action_show_earlier()  # type: ignore[attr-defined]


class Messages(VerticalScroll, can_focus=False):
    """The messages of a conversation. The view follows new text until the user scrolls up."""

    def __init__(self) -> None:
        super().__init__()
        self._window = WINDOW
        self._conversation_id = ""
        self._draw_lock = asyncio.Lock()

    def compose(self) -> ComposeResult:
        yield Static(id="welcome")
        yield Earlier(id="earlier", markup=False)

    def on_mount(self) -> None:
        self.anchor()

    def welcome(self, text: Content) -> None:
        self.query_one("#welcome", Static).update(text)

    async def show(self, conversation: Conversation, *, more: bool = False) -> None:
        """Show the current branch of a conversation. `more` adds earlier messages. Existing views are reused."""
        async with self._draw_lock:  # two keys may change the branch at the same time
            await self._show(conversation, more)

    async def _show(self, conversation: Conversation, more: bool) -> None:
        if conversation.id != self._conversation_id:
            self._conversation_id = conversation.id
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
        removed = views.keys() - {id(message) for message in visible}
        with self.app.batch_update():
            await self.remove_children([views[key] for key in removed])
            before: Static | MessageView = earlier
            for message in visible:
                place = conversation.place(message)
                view = views.get(id(message))
                if view is None:
                    view = MessageView(message, place)
                    await self.mount(view, after=before)
                else:
                    view.refresh_notes(place)
                before = view
        if not more:
            self.anchor()

    def view(self, message: Message) -> MessageView | None:
        """The view of a message, or None if it is not mounted."""
        return next((view for view in self.query(MessageView) if view.message is message), None)

    def step(self, message: Message | None, by: int) -> bool:
        """Move the focus by `by` messages from `message`; None stands for the prompt box below the last message.

        Returns False if there is no message at that distance.
        """
        views = list(self.query(MessageView))
        places = [place for place, view in enumerate(views) if view.message is message]
        target = (places[0] if places else len(views)) + by
        if not 0 <= target < len(views):
            return False
        views[target].focus()
        return True
