"""The chat screen: sends questions, shows answers, and handles the keys."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
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
from .answer import Channel, sentence
from .answer import run as run_answer
from .dispatch import execute
from .header import TINY, Header
from .hints import Hints
from .message import MessageView
from .messages import Messages
from .prompt import Prompt
from .status import Figures, StatusLine

RATE_SECONDS = 0.25  # seconds between updates of the rate of a running answer


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
        self.connection = connection
        self.recorder = recorder
        self.conversation = conversation
        self.folder = folder
        self._clock = clock
        self._answer_worker: Worker[None] | None = None
        self._edited_message: Message | None = None
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
        self.connection.on_change = self._update_figures
        self._update_figures()
        self.use_model(self.conversation.model)

    # Section: questions and answers

    @property
    def is_answering(self) -> bool:
        return self._answer_worker is not None and self._answer_worker.is_running

    def ask(self, text: str) -> bool:
        """Send a question at the end of the current branch, or as an alternative of the edited question.

        Returns False, and sends nothing, while an answer is running.
        """
        if self._is_busy():
            return False
        parent = self._edited_message.parent if self._edited_message else self.conversation.leaf
        self.leave_editing()
        question = self.conversation.add("user", text, parent=parent)
        self._answer(question)
        return True

    def action_regenerate(self, message: Message | None = None) -> None:
        """Generate another answer to the question of `message`, or to the last question."""
        path = [message] if message else self.conversation.path()
        if not path:
            self.say("There is no question yet.")
            return
        if self._is_busy():
            return
        if "seed" in self.conversation.parameters:
            self.say("A seed is set, so the answer may be the same. /set seed unsets it.")
        last = path[-1]
        self._answer(last if last.role == "user" else self.conversation.messages[last.parent or 0])

    def _answer(self, question: Message) -> None:
        self._answer_worker = self._run(self.conversation, self.conversation.add("assistant", parent=question.index))

    @work(group="answer")
    async def _run(self, conversation: Conversation, answer: Message) -> None:
        messages = self.query_one(Messages)
        try:
            await messages.show(conversation)
            await self.save()
            await run_answer(self.connection, conversation, answer, self._text_callback(messages, answer))
        finally:
            answer.finish = answer.finish or "stopped"
            self._rate = 0.0
            if (view := messages.view(answer)) is not None:
                await view.end()
            await self.save()
            self._answer_worker = None
            self._update_figures()
        if answer.finish in ("stop", "length"):
            await self._refresh_figures()

    def _text_callback(self, messages: Messages, answer: Message) -> Callable[[Channel, str], None]:
        """A callback that shows each addition to an answer and updates its rate."""
        view = messages.view(answer)
        start = 0.0
        updated = 0.0
        additions = 0

        def show(channel: Channel, text: str) -> None:
            nonlocal start, updated, additions
            now = self._clock()
            additions += 1
            if view is not None:
                view.append(channel, text)
            if additions == 1:
                start = now
                updated = now
                if view is not None:
                    view.refresh_notes(view.place)
            elif now - updated > RATE_SECONDS:
                updated = now
                self._rate = (additions - 1) / (now - start)
                self._update_status()

        return show

    async def _refresh_figures(self) -> None:
        """Update the figures of the status line. An error only changes the shown state: the answer is complete."""
        try:
            await self.connection.refresh()
        except AppError as error:
            self.connection.lost(error)

    async def stop(self) -> None:
        """Stop the running answer and save the text that it has so far."""
        if (worker := self._answer_worker) is not None:
            worker.cancel()
            with suppress(WorkerCancelled, WorkerFailed):
                await worker.wait()

    def _is_busy(self) -> bool:
        if self.is_answering:
            self.say("An answer is running. Esc stops it.")
        return self.is_answering

    # Section: the conversation

    async def save(self) -> None:
        """Save the conversation to the history. Of several failures in a row, only the first is reported."""
        try:
            await self.recorder.save(self.conversation)
            self._unsaved = False
        except StorageFailed as error:
            if not self._unsaved:
                self.say(f"{error.message} {error.hint}", severity="warning")
            self._unsaved = True
        self._update_figures()

    async def begin(self, conversation: Conversation) -> None:
        """Switch to another conversation."""
        await self.stop()
        await self.save()
        changed = conversation.model != self.conversation.model
        self.conversation = conversation
        self.leave_editing()
        await self.query_one(Messages).show(conversation)
        self._update_figures()
        self.query_one(Prompt).focus()
        if changed:
            self.use_model(conversation.model)

    def edit(self, message: Message) -> None:
        """Put a question into the prompt box to edit it. Sending it adds an alternative of the question."""
        self._edited_message = message
        prompt = self.query_one(Prompt)
        prompt.put(message.content)
        prompt.border_title = "editing: Enter sends, Esc cancels"
        prompt.add_class("editing")
        prompt.focus()

    def leave_editing(self) -> None:
        prompt = self.query_one(Prompt)
        if self._edited_message is not None:
            prompt.put("")
        self._edited_message = None
        prompt.border_title = None
        prompt.remove_class("editing")

    @work
    async def action_alternative(self, step: int, message: Message | None = None) -> None:
        """Show the previous or next alternative of `message`, or of the last message that has alternatives."""
        path = [message] if message else self.conversation.path()
        branches = [candidate for candidate in path if len(self.conversation.alternatives(candidate)) > 1]
        if not branches or self._is_busy():
            return
        number, count = self.conversation.place(branches[-1])
        alternative = self.conversation.alternatives(branches[-1])[(number - 1 + step) % count]
        self.conversation.show(alternative)
        messages = self.query_one(Messages)
        await messages.show(self.conversation)
        if message and (view := messages.view(alternative)):
            view.focus()
        await self.save()

    @work(exclusive=True, group="model")
    async def use_model(self, model: str) -> None:
        """Load a model. The conversation uses the model as soon as it is loaded."""
        try:
            await self.connection.use(model)
        except AppError as error:
            self.say(sentence(error), severity="error", title=f"Cannot use {model}")
            return
        if self.conversation.model != model:
            self.conversation.model = model
            self.say(f"Now using {model}.")
            await self.save()
        self._update_figures()

    # Section: keys and events

    @on(Prompt.Submitted)
    def _submitted(self, event: Prompt.Submitted) -> None:
        prompt = self.query_one(Prompt)
        text = event.text.strip("\n")
        if not text.strip():
            return
        try:
            call = commands.parse(text) if self._edited_message is None else None
        except InvalidRequest as error:
            self.say(sentence(error), severity="warning")
            return
        if call is not None:
            prompt.put("")
            self.execute(call, typed=text)
        elif self.ask(text[1:] if text.startswith("//") else text):
            prompt.put("")

    def action_command(self, name: str) -> None:
        self.execute(commands.Call(name, ""))

    @work
    async def execute(self, call: commands.Call, *, message: Message | None = None, typed: str = "") -> None:
        """Run a command. If it fails, put the text `typed` back into the prompt box."""
        try:
            await execute(self, call, message)
        except AppError as error:
            self.say(sentence(error), severity="warning")
            prompt = self.query_one(Prompt)
            if typed and not prompt.text:
                prompt.put(typed)

    @on(TextArea.Changed)
    def _typed(self) -> None:
        prompt = self.query_one(Prompt)
        hints = self.query_one(Hints)
        models = [entry.id for entry in self.connection.entries]
        hints.show(commands.hints(prompt.text, models) if self._edited_message is None else [])
        prompt.has_hints = hints.display

    @on(Prompt.HintMoved)
    def _move_hint(self, event: Prompt.HintMoved) -> None:
        hints = self.query_one(Hints)
        if event.step > 0:
            hints.action_cursor_down()
        else:
            hints.action_cursor_up()

    @on(Prompt.HintAccepted)
    def _accept_hint(self) -> None:
        if (text := self.query_one(Hints).completion) is not None:
            self.query_one(Prompt).put(text)

    @on(Prompt.Left)
    def _to_messages(self) -> None:
        self.query_one(Messages).step(None, -1)

    @on(MessageView.Requested)
    def _run_action(self, event: MessageView.Requested) -> None:
        actions: dict[str, Callable[[Message], object]] = {
            "up": self._focus_previous,
            "down": self._focus_next,
            "earlier": partial(self.action_alternative, -1),
            "later": partial(self.action_alternative, 1),
            "regenerate": self.action_regenerate,
            "edit": self._edit_question,
            "copy": self._copy_message,
            "copy_code": self._copy_code,
        }
        actions[event.action](event.message)

    def _focus_previous(self, message: Message) -> None:
        self.query_one(Messages).step(message, -1)

    def _focus_next(self, message: Message) -> None:
        if not self.query_one(Messages).step(message, 1):
            self.query_one(Prompt).focus()

    def _edit_question(self, message: Message) -> None:
        if message.role == "user" and not self._is_busy():
            self.edit(message)

    def _copy_message(self, message: Message) -> None:
        self.copy(message.content, "The message")

    def _copy_code(self, message: Message) -> None:
        self.execute(commands.Call("copy", "code"), message=message)

    def action_back(self) -> None:
        """Handle Esc: close the completions, cancel editing, or stop the answer."""
        prompt = self.query_one(Prompt)
        if self.query_one(Hints).display:
            self.query_one(Hints).show([])
            prompt.has_hints = False
        elif self._edited_message is not None:
            self.leave_editing()
        elif self._answer_worker is not None:
            self._answer_worker.cancel()
        prompt.focus()

    def action_scroll_messages(self, pages: int) -> None:
        messages = self.query_one(Messages)
        if pages < 0:
            messages.scroll_page_up()
        else:
            messages.scroll_page_down()

    @work
    async def action_show_earlier(self) -> None:
        await self.query_one(Messages).show(self.conversation, more=True)

    # Section: notices and figures

    def copy(self, text: str, what: str) -> None:
        self.app.copy_to_clipboard(visible(text))
        self.say(f"{what} was copied to the clipboard.")

    def say(self, words: str, *, severity: str = "information", title: str = "") -> None:
        self.app.notify(visible(words), severity=severity, title=title, markup=False)  # type: ignore[arg-type]

    def _update_figures(self) -> None:
        """Update header, welcome text and status line."""
        conversation = self.conversation
        connection = self.connection
        bundled = connection.is_bundled(conversation.model)
        self.query_one(Header).show(conversation.model, bundled, conversation.title)
        self.query_one(Messages).welcome(_welcome(conversation.model, bundled))
        self._update_status()

    def _update_status(self) -> None:
        conversation = self.conversation
        connection = self.connection
        answers = [message for message in conversation.path() if message.prompt_tokens]
        is_answering = self.is_answering and connection.state == "ready"
        self.query_one(StatusLine).show(
            Figures(
                "answering" if is_answering else connection.state,
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
        (f"This is {model}, a {TINY}.", "bold"),
        " It answers questions about localllm, knows little else, and makes mistakes.",
        "\n\nFor a larger model, run ",
        ("localllm pull org/repo", "bold"),
        ", then use ",
        ("/model", "bold"),
        keys,
    )
