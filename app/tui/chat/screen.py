"""The chat screen: it holds the conversation, asks for answers and shows what comes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import TextArea
from textual.worker import Worker, WorkerCancelled, WorkerFailed

from ...errors import AppError, InvalidRequest, StorageFailed
from .. import commands
from ..connection import Connection
from ..conversation import Conversation, Message
from ..history.recorder import Recorder
from ..text import visible
from . import answer as answering
from .dispatch import obey
from .header import TINY, Header
from .hints import Hints
from .message import MessageView
from .messages import Messages
from .prompt import Prompt
from .status import Figures, StatusLine

RATE_SECONDS = 0.25  # how often the rate of a running answer is told


class ChatScreen(Screen[None]):
    BINDINGS = [
        Binding("escape", "back", "Stop"),
        Binding("ctrl+r", "regenerate", "Again"),
        Binding("ctrl+n", "command('new')", "New"),
        Binding("f1", "command('help')", "Help"),
        Binding("f2", "command('model')", "Models"),
        Binding("f3", "command('history')", "History"),
        Binding("f4", "command('settings')", "Settings"),
        Binding("alt+left", "alternative(-1)", "Earlier answer"),
        Binding("alt+right", "alternative(1)", "Later answer"),
        Binding("pageup", "scroll_messages(-1)", "Page up"),
        Binding("pagedown", "scroll_messages(1)", "Page down"),
    ]

    def __init__(
        self,
        connection: Connection,
        recorder: Recorder,
        conversation: Conversation,
        clock: Callable[[], float],
        folder: Path,
    ) -> None:
        super().__init__()
        self.connection, self.recorder, self.conversation, self.folder = connection, recorder, conversation, folder
        self._clock = clock
        self._answering: Worker[None] | None = None
        self._editing: Message | None = None
        self._rate = 0.0
        self._unsaved = False

    def compose(self) -> ComposeResult:
        yield Header()
        yield Messages()
        with Vertical(id="dock"):
            yield Hints()
            yield Prompt()
            yield StatusLine()

    def on_mount(self) -> None:
        self.query_one(Prompt).focus()
        self.connection.on_change = self._tell
        self._tell()
        self.use_model(self.conversation.model)

    # asking and answering

    @property
    def is_answering(self) -> bool:
        return self._answering is not None and self._answering.is_running

    def ask(self, text: str) -> bool:
        """Send a question, below the shown path or as an alternative of the one being edited. False: not now."""
        if self._is_busy():
            return False
        parent = self._editing.parent if self._editing else self.conversation.leaf
        self.leave_editing()
        question = self.conversation.add("user", text, parent=parent)
        self._answer(question)
        return True

    def action_regenerate(self, message: Message | None = None) -> None:
        """Another answer to the question of this answer, or to the last question."""
        message = message or next(iter(self.conversation.path()[::-1]), None)
        if message is None:
            self.say("There is nothing to answer again yet.")
        elif not self._is_busy():
            asked = self.conversation.messages[message.parent or 0] if message.role == "assistant" else message
            if "seed" in self.conversation.parameters:
                self.say("The seed is set, so the answer may be the same. /set seed unsets it.")
            self._answer(asked)

    def _answer(self, question: Message) -> None:
        self._answering = self._run(self.conversation, self.conversation.add("assistant", parent=question.index))

    @work(group="answer")
    async def _run(self, conversation: Conversation, answer: Message) -> None:
        messages = self.query_one(Messages)
        try:
            await messages.show(conversation)
            await self.save()
            await answering.run(self.connection, conversation, answer, self._shower(messages, answer))
        finally:
            answer.finish = answer.finish or "stopped"
            self._rate = 0.0
            if (view := messages.view(answer)) is not None:
                await view.end()
            await self.save()
            self._answering = None
            self._tell()
        if answer.finish in ("stop", "length"):
            await self._look()

    def _shower(self, messages: Messages, answer: Message) -> Callable[[answering.Part, str], None]:
        """What shows each piece of an answer, and now and then its rate."""
        view, began, told, pieces = messages.view(answer), 0.0, 0.0, 0

        def show(part: answering.Part, text: str) -> None:
            nonlocal began, told, pieces
            now, pieces = self._clock(), pieces + 1
            if view is not None:
                view.grow(part, text)
            if pieces == 1:
                began = told = now
                if view is not None:
                    view.settle(view.place)
            elif now - told > RATE_SECONDS:
                told, self._rate = now, (pieces - 1) / (now - began)
                self._tell_status()

        return show

    async def _look(self) -> None:
        """Bring the engine's own figures up to date; the answer is here already, so a failure only shows as a state."""
        try:
            await self.connection.refresh()
        except AppError as error:
            self.connection.lost(error)

    async def stop(self) -> None:
        """End the running answer, its text so far kept and saved."""
        if (running := self._answering) is not None:
            running.cancel()
            with suppress(WorkerCancelled, WorkerFailed):
                await running.wait()

    def _is_busy(self) -> bool:
        if self.is_answering:
            self.say("An answer is running. Esc stops it.")
        return self.is_answering

    # the conversation

    async def save(self) -> None:
        """Keep the conversation in the history; when that fails say so once, and try again with the next turn."""
        try:
            await self.recorder.save(self.conversation)
            self._unsaved = False
        except StorageFailed as error:
            if not self._unsaved:
                self.say(f"{error.message} {error.hint}", severity="warning")
            self._unsaved = True
        self._tell()

    async def begin(self, conversation: Conversation) -> None:
        """Leave this conversation for another one."""
        await self.stop()
        await self.save()
        changed = conversation.model != self.conversation.model
        self.conversation = conversation
        self.leave_editing()
        await self.query_one(Messages).show(conversation)
        self._tell()
        self.query_one(Prompt).focus()
        if changed:
            self.use_model(conversation.model)

    def edit(self, message: Message) -> None:
        """Put a question back into the prompt box; sending it makes an alternative of it."""
        self._editing = message
        prompt = self.query_one(Prompt)
        prompt.put(message.content)
        prompt.border_title = "editing: Enter sends it anew, Esc leaves it as it was"
        prompt.add_class("editing")
        prompt.focus()

    def leave_editing(self) -> None:
        prompt = self.query_one(Prompt)
        if self._editing is not None:
            prompt.put("")
        self._editing = None
        prompt.border_title = None
        prompt.remove_class("editing")

    @work
    async def action_alternative(self, step: int, message: Message | None = None) -> None:
        """Show the alternative before or after this one; of the last message that has any, when none is given."""
        path = [message] if message else self.conversation.path()[::-1]
        for candidate in path:
            others = self.conversation.alternatives(candidate)
            if len(others) > 1 and not self._is_busy():
                at = next(i for i, other in enumerate(others) if other is candidate)
                shown = others[(at + step) % len(others)]
                self.conversation.show(shown)
                messages = self.query_one(Messages)
                await messages.show(self.conversation)
                if message and (view := messages.view(shown)):
                    view.focus()
                await self.save()
                return

    @work(exclusive=True, group="model")
    async def use_model(self, model: str) -> None:
        """Load a model; the conversation goes on with it once the daemon has it."""
        try:
            await self.connection.use(model)
        except AppError as error:
            self.say(answering.sentence(error), severity="error", title=f"{model} cannot be used now")
            return
        if self.conversation.model != model:
            self.conversation.model = model
            self.say(f"Answers now come from {model}.")
            await self.save()
        self._tell()

    # keys and events

    @on(Prompt.Submitted)
    def _submitted(self, event: Prompt.Submitted) -> None:
        prompt = self.query_one(Prompt)
        text = event.text.strip("\n")
        if not text.strip():
            return
        try:
            call = commands.parse(text) if self._editing is None else None
        except InvalidRequest as error:
            self.say(answering.sentence(error), severity="warning")
            return
        if call is not None:
            prompt.put("")
            self.obey(call, typed=text)
        elif self.ask(text[1:] if text.startswith("//") else text):
            prompt.put("")

    def action_command(self, name: str) -> None:
        self.obey(commands.Call(name, ""))

    @work
    async def obey(self, call: commands.Call, *, message: Message | None = None, typed: str = "") -> None:
        """Carry out a command; `typed` comes back into the prompt box when it is refused."""
        try:
            await obey(self, call, message)
        except AppError as error:
            self.say(answering.sentence(error), severity="warning")
            prompt = self.query_one(Prompt)
            if typed and not prompt.text:
                prompt.put(typed)

    @on(TextArea.Changed)
    def _typed(self) -> None:
        prompt, hints = self.query_one(Prompt), self.query_one(Hints)
        models = [entry.id for entry in self.connection.entries]
        hints.show(commands.hints(prompt.text, models) if self._editing is None else [])
        prompt.hinting = hints.display

    @on(Prompt.HintMoved)
    def _move_hint(self, event: Prompt.HintMoved) -> None:
        hints = self.query_one(Hints)
        hints.action_cursor_down() if event.step > 0 else hints.action_cursor_up()

    @on(Prompt.HintTaken)
    def _take_hint(self) -> None:
        if (text := self.query_one(Hints).completion) is not None:
            self.query_one(Prompt).put(text)

    @on(Prompt.Left)
    def _to_messages(self) -> None:
        self.query_one(Messages).step(None, -1)

    @on(MessageView.Asked)
    def _wish(self, event: MessageView.Asked) -> None:
        message, messages = event.message, self.query_one(Messages)
        match event.wish:
            case "up":
                messages.step(message, -1)
            case "down":
                if not messages.step(message, 1):
                    self.query_one(Prompt).focus()
            case "earlier" | "later":
                self.action_alternative(-1 if event.wish == "earlier" else 1, message)
            case "regenerate":
                self.action_regenerate(message)
            case "edit" if message.role == "user":
                if not self._is_busy():
                    self.edit(message)
            case "copy":
                self.copy(message.content, "The message")
            case "copy_code":
                self.obey(commands.Call("copy", "code"), message=message)

    def action_back(self) -> None:
        """Esc: out of what is open, the smallest first."""
        prompt = self.query_one(Prompt)
        if self.query_one(Hints).display:
            self.query_one(Hints).show([])
            prompt.hinting = False
        elif self._editing is not None:
            self.leave_editing()
        elif self._answering is not None:
            self._answering.cancel()
        prompt.focus()

    def action_scroll_messages(self, pages: int) -> None:
        messages = self.query_one(Messages)
        messages.scroll_page_up() if pages < 0 else messages.scroll_page_down()

    @work
    async def action_show_earlier(self) -> None:
        await self.query_one(Messages).show(self.conversation, more=True)

    # what is told

    def copy(self, text: str, what: str) -> None:
        self.app.copy_to_clipboard(visible(text))
        self.say(f"{what} was sent to the clipboard.")

    def say(self, words: str, *, severity: str = "information", title: str = "") -> None:
        self.app.notify(visible(words), severity=severity, title=title, markup=False)  # type: ignore[arg-type]

    def _tell(self) -> None:
        """Bring header, welcome and status line up to date."""
        conversation, connection = self.conversation, self.connection
        bundled = connection.is_bundled(conversation.model)
        self.query_one(Header).tell(conversation.model, bundled, conversation.title)
        self.query_one(Messages).welcome(_welcome(conversation.model, bundled))
        self._tell_status()

    def _tell_status(self) -> None:
        conversation, connection = self.conversation, self.connection
        answers = [message for message in conversation.path() if message.prompt_tokens]
        self.query_one(StatusLine).tell(
            Figures(
                "answering" if self.is_answering and connection.state == "ready" else connection.state,
                connection.running(conversation.model),
                connection.context(conversation.model),
                answers[-1] if answers else None,
                self._rate,
                self._unsaved,
            )
        )


def _welcome(model: str, bundled: bool) -> Content:
    keys = "\n\nEnter sends · Ctrl+J new line · Esc stops · / commands · F1 help"
    if not bundled:
        return Content.assemble(("What would you like to know?", "bold"), keys)
    return Content.assemble(
        (f"You are talking to {model}, a {TINY}.", "bold"),
        " It knows localllm and small talk, little else, and it makes mistakes.",
        "\n\nA larger model, once: ",
        ("localllm pull org/repo", "bold"),
        "   then here: ",
        ("/model", "bold"),
        keys,
    )
