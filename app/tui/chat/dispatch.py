"""The actions of the slash commands."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ...client import adapter_name
from ...errors import AdapterNotFound, InvalidRequest
from .. import export, parameters, selection
from ..adapters import AdapterScreen, Choice
from ..commands import Call
from ..conversation import Conversation, Message
from ..dialog import show
from ..help import HelpScreen
from ..history.screen import HistoryScreen
from ..models.browser import ModelChoice
from ..models.screen import ModelScreen
from ..settings import NewSettings, SettingsScreen
from ..text import clean, one_line, phrase
from ..theme import DARK, LIGHT
from .screen import ChatScreen


async def execute(screen: ChatScreen, call: Call, message: Message | None = None) -> None:
    """Run a command. `message`: the message on which a key was pressed; None: typed command. Raises AppError."""
    if call.name == "copy":
        _copy(screen, call.argument, message)
    else:
        await _COMMANDS[call.name](screen, call.argument)


async def _model(screen: ChatScreen, name: str) -> None:
    async def use(choice: ModelChoice | None) -> None:
        if choice is not None:
            screen.use_model(choice.model, choice.adapter)

    if name:
        screen.use_model(name)
    else:
        show(screen, ModelScreen(screen.connection, screen.conversation.model), use)


async def _adapter(screen: ChatScreen, name: str) -> None:
    if name:
        await _use_adapter(screen, await _loaded_adapter(screen, name))
    else:
        _show_adapters(screen, compares=False)


async def _compare(screen: ChatScreen, argument: str) -> None:
    names = argument.split()
    if not names:
        _show_adapters(screen, compares=True)
        return
    example = "Example: /compare none pirate=0.5"
    if len(names) > 2:
        raise InvalidRequest("/compare takes at most two adapters.", hint=example)
    adapters = [await _loaded_adapter(screen, name) for name in names]
    if len(adapters) == 2:
        screen.conversation.adapter = adapters[0]
    if adapters[-1] == screen.conversation.adapter:
        raise InvalidRequest("Both answers would use the same adapter.", hint=example)
    screen.compare_with(adapters[-1])


def _show_adapters(screen: ChatScreen, compares: bool) -> None:
    async def choose(choice: Choice | None) -> None:
        if choice is None:
            return
        if choice.compares:
            screen.compare_with(choice.selection)
        else:
            await _use_adapter(screen, choice.selection)

    conversation = screen.conversation
    show(screen, AdapterScreen(screen.connection, conversation.model, conversation.adapter, compares=compares), choose)


async def _use_adapter(screen: ChatScreen, adapter: str) -> None:
    """Select a loaded adapter for the next answer; empty: the base model alone."""
    conversation = screen.conversation
    conversation.adapter = adapter
    screen.say(f"The next answer uses {phrase('the adapter {}', selection.label(adapter)) or 'the base model alone'}.")
    name = adapter and selection.split(adapter)[0]
    for entry in screen.connection.adapters_of(conversation.model):
        if entry.name == name and entry.warning:
            screen.say(entry.warning, severity="warning")
    await screen.save()


async def _loaded_adapter(screen: ChatScreen, typed: str) -> str:
    """The selection of a typed adapter, which is loaded if necessary. Raises AppError."""
    connection = screen.connection
    model = screen.conversation.model
    names = [entry.name for entry in connection.adapters_of(model)]
    if typed.lower() in selection.BASE and typed not in names:
        return ""
    name, scale = selection.split(typed)
    if name not in names:
        listed = await connection.adapter_folders()
        folders = [folder for folder in listed if name in (folder.id, adapter_name(folder.id))]
        if not folders:
            raise AdapterNotFound(f"There is no adapter {name!r}.", hint=f"Loaded: {', '.join(names) or 'none'}.")
        name = adapter_name(folders[0].id)
        await connection.load_adapter(model, name, folders[0].id)
    return selection.join(name, scale)


async def _history(screen: ChatScreen, words: str) -> None:
    async def resume(id: str | None) -> None:
        if id is not None and id != screen.conversation.id:
            screen.resume(id)
        else:
            await screen.save()

    await screen.save()
    show(screen, HistoryScreen(screen.recorder, screen.conversation, words), resume)


async def _settings(screen: ChatScreen, _: str) -> None:
    async def save(choice: NewSettings | None) -> None:
        if choice is not None:
            screen.conversation.system = choice.system
            screen.conversation.parameters = choice.parameters
            screen.say("Saved. They apply to the next answer.")
            await screen.save()

    conversation = screen.conversation
    model = conversation.model
    connection = screen.connection
    dialog = SettingsScreen(
        conversation.system, conversation.parameters, model, connection.running(model), connection.context(model)
    )
    show(screen, dialog, save)


async def _set(screen: ChatScreen, argument: str) -> None:
    name, _, text = argument.partition(" ")
    values = screen.conversation.parameters
    if not name:
        texts = [f"{name} {parameters.format_value(value)}" for name, value in values.items()]
        screen.say(f"Set: {', '.join(texts)}." if texts else "No parameter is set: the model's defaults apply.")
        return
    target = parameters.parameter(name)
    value = parameters.parse(name, text)
    values.pop(target.name, None)
    if value is None:
        screen.say(f"{target.name} is unset: the model's default applies.")
    else:
        values[target.name] = value
        screen.say(f"{target.name} is {parameters.format_value(value)} for the next answer.")
    await screen.save()


async def _system(screen: ChatScreen, text: str) -> None:
    if not text:
        await _settings(screen, "")
        return
    is_removed = text.lower() == "none"
    screen.conversation.system = "" if is_removed else clean(text)
    screen.say(f"The system prompt is {'removed' if is_removed else 'set'}.")
    await screen.save()


async def _new(screen: ChatScreen, _: str) -> None:
    old = screen.conversation
    await screen.begin(Conversation(old.model, old.system, dict(old.parameters)))


async def _clear(screen: ChatScreen, _: str) -> None:
    await screen.begin(Conversation(screen.conversation.model))


async def _regenerate(screen: ChatScreen, _: str) -> None:
    screen.action_regenerate()


async def _edit(screen: ChatScreen, _: str) -> None:
    questions = [message for message in screen.conversation.path() if message.role == "user"]
    if not questions:
        raise InvalidRequest("There is no message to edit.")
    if screen.is_answering:
        raise InvalidRequest("An answer is running.", hint="Press Esc to stop the answer.")
    screen.edit(questions[-1])


async def _stop(screen: ChatScreen, _: str) -> None:
    if not screen.is_answering:
        raise InvalidRequest("No answer is running.")
    await screen.stop()


def _copy(screen: ChatScreen, argument: str, message: Message | None) -> None:
    answers = [answer for answer in screen.conversation.path() if answer.role == "assistant" and answer.content]
    message = message or (answers[-1] if answers else None)
    if message is None:
        raise InvalidRequest("There is no answer to copy.")
    first, _, number = argument.partition(" ")
    if not argument:
        screen.copy(message.content, "The answer")
    elif argument == "all":
        screen.copy(export.markdown(screen.conversation), "The conversation")
    elif first == "code":
        _copy_code(screen, message, number)
    else:
        hint = "Try /copy, /copy code 2 or /copy all."
        raise InvalidRequest(f"Unknown argument of /copy: {argument[:40]!r}.", hint=hint)


def _copy_code(screen: ChatScreen, message: Message, number: str) -> None:
    """Copy a code block by its number, counted from 1; no number: the last block."""
    blocks = export.code_blocks(message.content)
    by_number = {str(index): block for index, block in enumerate(blocks, 1)}
    chosen = number or str(len(blocks))
    if chosen not in by_number:
        raise InvalidRequest(f"There is no code block {number or 'in this message'}; the message has {len(blocks)}.")
    screen.copy(by_number[chosen], f"Code block {chosen} of {len(blocks)}")


async def _title(screen: ChatScreen, text: str) -> None:
    if not text:
        raise InvalidRequest("The title is missing.", hint="Example: /title a few words")
    screen.conversation.title = one_line(text)
    await screen.save()


async def _export(screen: ChatScreen, argument: str) -> None:
    file = await asyncio.to_thread(export.write, screen.conversation, argument, screen.folder)
    screen.say(f"Exported to {file}")


async def _theme(screen: ChatScreen, name: str) -> None:
    themes = {"light": LIGHT.name, "dark": DARK.name, "": DARK.name if screen.app.theme == LIGHT.name else LIGHT.name}
    theme = themes.get(name)
    if theme is None:
        hint = "Use /theme light or /theme dark; Ctrl+P has more themes."
        raise InvalidRequest(f"Unknown theme {name[:40]!r}.", hint=hint)
    screen.app.theme = theme


async def _help(screen: ChatScreen, _: str) -> None:
    show(screen, HelpScreen())


async def _quit(screen: ChatScreen, _: str) -> None:
    await screen.app.run_action("quit")


_COMMANDS: dict[str, Callable[[ChatScreen, str], Awaitable[None]]] = {
    "model": _model,
    "adapter": _adapter,
    "compare": _compare,
    "history": _history,
    "settings": _settings,
    "set": _set,
    "system": _system,
    "new": _new,
    "clear": _clear,
    "regen": _regenerate,
    "edit": _edit,
    "stop": _stop,
    "title": _title,
    "export": _export,
    "theme": _theme,
    "help": _help,
    "quit": _quit,
}
