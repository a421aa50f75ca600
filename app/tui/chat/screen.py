"""The chat screen: sends questions, shows answers, and handles the keys."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.message import Message as Event
from textual.screen import Screen
from textual.widgets import TextArea

from ...errors import AppError, InvalidRequest, StorageFailed
from .. import commands, selection
from ..connection import Connection
from ..conversation import Conversation, Message
from ..history.recorder import Recorder
from ..text import visible
from .answer import sentence
from .answering import Answering
from .compare import CompareScreen
from .dock import Dock
from .footer import Footer, keys
from .header import Header
from .message import MessageView
from .messages import Messages
from .prompt import Prompt
from .status import Figures, StatusLine
from .welcome import welcome


class ChatScreen(Screen[None]):
    BINDINGS = [
        Binding("escape", "back", "Stop"),
        Binding("ctrl+r", "regenerate", "Again"),
        Binding("ctrl+n", "command('new')", "New"),
        Binding("f1", "command('help')", "Help"),
        Binding("f2", "command('model')", "Models"),
        Binding("f3", "command('history')", "History"),
        Binding("f4", "command('settings')", "Settings"),
        Binding("f5", "command('adapter')", "Adapters"),
        Binding("alt+left", "alternative(-1)", "Earlier answer"),
        Binding("alt+right", "alternative(1)", "Later answer"),
        Binding("pageup", "scroll_messages('up')", "Page up"),
        Binding("pagedown", "scroll_messages('down')", "Page down"),
    ]

    class Commanded(Event):
        """The user gives a command: `typed` in the prompt box, by a key on `message`, or by another key."""

        def __init__(self, call: commands.Call, message: Message | None = None, typed: str = "") -> None:
            super().__init__()
            self.call = call
            self.message = message
            self.typed = typed

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
        self._answering: Answering | CompareScreen | None = None
        self._rate = 0.0  # tokens per second of the running answer; 0: unknown
        self._unsaved = False

    def compose(self) -> ComposeResult:
        yield Header()
        yield Messages()
        yield Dock(self._arguments)

    def on_mount(self) -> None:
        self.query_one(Prompt).focus()
        self.connection.on_change = self.update_figures
        self.connection.on_warning = partial(self.say, severity="warning")
        self.update_figures()
        self.use_model(self.conversation.model)

    # Section: questions and answers

    @property
    def is_answering(self) -> bool:
        return self._answering is not None and self._answering.is_answering

    def ask(self, text: str) -> bool:
        """Send a question at the end of the current branch, or as an alternative of the edited question.

        Returns False, and sends nothing, while an answer is running.
        """
        if self._is_busy():
            return False
        dock = self.query_one(Dock)
        parent = dock.edited_message.parent if dock.edited_message else self.conversation.leaf
        self._answer(self.conversation.add("user", text, parent=parent))
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
        """Answer a question, or show two answers side by side if the prompt box was used for a comparison."""
        dock = self.query_one(Dock)
        other_adapter = dock.other_adapter
        dock.leave()
        conversation = self.conversation
        answer = conversation.add("assistant", parent=question.index)
        if other_adapter is None:
            messages = self.query_one(Messages)
            self._answering = Answering(messages, self.connection, conversation, answer, self._clock)
        else:
            other = conversation.add("assistant", parent=question.index)
            other.adapter = other_adapter
            self._answering = CompareScreen(self.connection, conversation, (answer, other), self._clock)
            self.app.push_screen(self._answering, partial(self._go_on, conversation))
        self.run_worker(self.save())

    async def _go_on(self, conversation: Conversation, answer: Message | None) -> None:
        """Go on with the answer that the user chooses in a comparison."""
        assert answer is not None
        self._answering = None
        conversation.show(answer)
        conversation.adapter = answer.adapter
        if conversation is self.conversation:
            await self.query_one(Messages).show(conversation)
            await self.save()

    async def stop(self) -> None:
        """Stop the running answer, or both answers of a comparison. Each keeps the text that it has so far."""
        if self._answering is not None:
            await self._answering.stop()

    @on(MessageView.Streamed)
    def _show_rate(self, event: MessageView.Streamed) -> None:
        if self.is_answering:
            self._rate = event.rate
            self.update_status()

    @on(Answering.Ended)
    @work
    async def _end(self, event: Answering.Ended) -> None:
        """Save the answer. The status line then shows its figures; an error only changes the shown state."""
        self._rate = 0.0
        await self.save()
        if event.answer.finish in ("stop", "length"):
            with suppress(AppError):
                await self.connection.refresh()

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
        self.update_figures()

    async def begin(self, conversation: Conversation) -> None:
        """Switch to another conversation."""
        await self.stop()
        await self.save()
        changed = conversation.model != self.conversation.model
        self.conversation = conversation
        self.query_one(Dock).leave()
        await self.query_one(Messages).show(conversation)
        self.update_figures()
        self.query_one(Prompt).focus()
        if changed:
            self.use_model(conversation.model)

    @work(exclusive=True, group="resume")
    async def resume(self, id: str) -> None:
        """Switch to an earlier conversation."""
        try:
            conversation = await self.recorder.load(id)
        except StorageFailed as error:
            self.say(sentence(error), severity="warning")
            return
        await self.begin(conversation)

    def edit(self, message: Message) -> None:
        """Put a question into the prompt box to edit it. Sending it adds an alternative of the question."""
        self.query_one(Dock).edit(message)
        self.update_keys()

    def compare_with(self, adapter: str) -> None:
        """Ask the next prompt of the current adapter and of `adapter` (empty: the base model), side by side."""
        self.query_one(Dock).compare(self.conversation.adapter, adapter)
        self.update_keys()

    @work
    async def action_alternative(self, step: int, message: Message | None = None) -> None:
        """Show the previous or next alternative of `message`, or of the last message that has alternatives."""
        path = [message] if message else self.conversation.path()
        branches = [branch for branch in path if len(self.conversation.alternatives(branch)) > 1]
        if not branches or self._is_busy():
            return
        alternatives = self.conversation.alternatives(branches[-1])
        alternative = alternatives[(alternatives.index(branches[-1]) + step) % len(alternatives)]
        self.conversation.show(alternative)
        messages = self.query_one(Messages)
        await messages.show(self.conversation)
        if message and (view := messages.view(alternative)):
            view.focus()
        await self.save()

    @work(exclusive=True, group="model")
    async def use_model(self, model: str, adapter: str = "") -> None:
        """Load a model, then an adapter of it (empty: none). The conversation uses the model as soon as it is loaded.

        A later call replaces this one.
        """
        try:
            await self.connection.use(model)
        except AppError as error:
            self.say(sentence(error), severity="error", title=f"Cannot use {model}")
            return
        if self.conversation.model != model:
            self.conversation.model = model
            self.say(f"Now using {model}.{self._unset_adapter()}")
            await self.save()
        self.update_figures()
        if adapter:
            self.command("adapter", adapter)

    def _unset_adapter(self) -> str:
        """Unset an adapter that the model does not have. Returns a sentence about it; empty: nothing was unset."""
        adapter = self.conversation.adapter
        if not adapter or selection.split(adapter)[0] in self._adapter_names():
            return ""
        self.conversation.adapter = ""
        return f" It has no adapter {adapter}, so no adapter is selected."

    def _adapter_names(self) -> list[str]:
        return [entry.name for entry in self.connection.adapters_of(self.conversation.model)]

    # Section: keys and events

    @on(Prompt.Submitted)
    def _submitted(self, event: Prompt.Submitted) -> None:
        prompt = self.query_one(Prompt)
        text = event.text.strip("\n")
        if not text.strip():
            return
        try:
            call = commands.parse(text) if self.query_one(Dock).edited_message is None else None
        except InvalidRequest as error:
            self.say(sentence(error), severity="warning")
            return
        if call is not None:
            prompt.put("")
            self.post_message(self.Commanded(call, typed=text))
        elif self.ask(text[1:] if text.startswith("//") else text):
            prompt.put("")

    def action_command(self, name: str) -> None:
        self.command(name)

    def command(self, name: str, argument: str = "", message: Message | None = None) -> None:
        self.post_message(self.Commanded(commands.Call(name, argument), message))

    def refuse(self, command: Commanded, error: AppError) -> None:
        """Show the error of a command, and put its text back into the prompt box."""
        self.say(sentence(error), severity="warning")
        prompt = self.query_one(Prompt)
        if not prompt.text:
            prompt.put(command.typed)

    def _arguments(self) -> dict[str, list[str]]:
        """The arguments that a command can have now, by the name of the command."""
        adapters = [*self._adapter_names(), "none"]
        models = [entry.id for entry in self.connection.entries]
        return {"model": models, "adapter": adapters, "compare": adapters}

    @on(Prompt.Left)
    def _to_messages(self) -> None:
        self.query_one(Messages).step(None, -1)

    @on(MessageView.Requested)
    def _run_action(self, event: MessageView.Requested) -> None:
        actions: dict[str, Callable[[Message], object]] = {
            "up": partial(self._step, -1),
            "down": partial(self._step, 1),
            "earlier": partial(self.action_alternative, -1),
            "later": partial(self.action_alternative, 1),
            "regenerate": self.action_regenerate,
            "edit": self._edit_question,
            "copy": lambda message: self.copy(message.content, "The message"),
            "copy_code": partial(self.command, "copy", "code"),
        }
        actions[event.action](event.message)

    def _step(self, by: int, message: Message) -> None:
        """Move the focus to another message; below the last one, to the prompt box."""
        if not self.query_one(Messages).step(message, by) and by > 0:
            self.query_one(Prompt).focus()

    def _edit_question(self, message: Message) -> None:
        if message.role == "user" and not self._is_busy():
            self.edit(message)

    def action_back(self) -> None:
        """Handle Esc: close the completions, cancel the special purpose of the prompt, or stop the answer."""
        dock = self.query_one(Dock)
        if not (dock.close_hints() or dock.leave()):
            self.run_worker(self.stop())
        self.query_one(Prompt).focus()
        self.update_keys()

    async def action_scroll_messages(self, direction: str) -> None:
        await self.query_one(Messages).run_action(f"page_{direction}")

    @work
    async def action_show_earlier(self) -> None:
        await self.query_one(Messages).show(self.conversation, more=True)

    # Section: notices and figures

    def copy(self, text: str, what: str) -> None:
        self.app.copy_to_clipboard(visible(text))
        self.say(f"{what} was copied to the clipboard.")

    def say(self, words: str, *, severity: str = "information", title: str = "") -> None:
        self.app.notify(visible(words), severity=severity, title=title, markup=False)  # type: ignore[arg-type]

    def update_figures(self) -> None:
        """Update header, welcome text and status line. Does nothing when the application ends."""
        if not self.is_attached:
            return
        conversation = self.conversation
        connection = self.connection
        bundled = connection.is_bundled(conversation.model)
        self.query_one(Header).show(conversation.model, bundled, conversation.title)
        self.query_one(Messages).welcome(welcome(conversation.model, bundled))
        self.update_status()

    def update_status(self) -> None:
        conversation = self.conversation
        connection = self.connection
        answers = [message for message in conversation.path() if message.prompt_tokens]
        is_answering = self.is_answering and connection.state == "ready"
        self.query_one(StatusLine).show(
            Figures(
                "answering" if is_answering else connection.state,
                self._adapter_label(),
                connection.running(conversation.model),
                connection.context(conversation.model),
                answers[-1] if answers else None,
                self._rate,
                self._unsaved,
            ).segments()
        )
        self.update_keys()

    def update_keys(self) -> None:
        """Show the keys that work now."""
        dock = self.query_one(Dock)
        self.query_one(Footer).show(
            keys(
                is_answering=self.is_answering,
                is_message=isinstance(self.focused, MessageView),
                has_hints=dock.has_hints,
                purpose=dock.purpose,
            )
        )

    @on(TextArea.Changed)
    def _typed(self) -> None:
        self.update_keys()

    def on_descendant_focus(self) -> None:
        self.update_keys()

    def _adapter_label(self) -> str:
        """The selected adapter, or the daemon's default adapter of the model; empty: none."""
        entries = self.connection.adapters_of(self.conversation.model)
        defaults = [f"{entry.name} ×{entry.scale:g} (default)" for entry in entries if entry.scale]
        return selection.label(self.conversation.adapter) or next(iter(defaults), "")
