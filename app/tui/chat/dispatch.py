"""The actions of the slash commands."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from ...errors import InvalidRequest
from .. import export, parameters
from ..commands import Call
from ..conversation import Conversation, Message
from ..help import HelpScreen
from ..history.screen import HistoryScreen
from ..models import ModelScreen
from ..settings import NewSettings, SettingsScreen
from ..text import clean, one_line
from ..theme import DARK, LIGHT

if TYPE_CHECKING:
    from .screen import ChatScreen


async def execute(screen: ChatScreen, call: Call, message: Message | None = None) -> None:
    """Run a command. `message` is the focused message, for keys on a message. Raises AppError."""
    if call.name == "copy":
        _copy(screen, call.argument, message)
    else:
        await _COMMANDS[call.name](screen, call.argument)


async def _model(screen: ChatScreen, name: str) -> None:
    if name:
        screen.use_model(name)
    else:

        def use(model: str | None) -> None:
            if model is not None:
                screen.use_model(model)

        screen.app.push_screen(ModelScreen(screen.connection, screen.conversation.model), use)


async def _history(screen: ChatScreen, words: str) -> None:
    async def resume(id: str | None) -> None:
        if id is not None and id != screen.conversation.id:
            await screen.begin(await screen.recorder.load(id))
        else:
            await screen.save()

    await screen.save()
    screen.app.push_screen(HistoryScreen(screen.recorder, screen.conversation, words), resume)


async def _settings(screen: ChatScreen, _: str) -> None:
    async def save(choice: NewSettings | None) -> None:
        if choice is not None:
            screen.conversation.system = choice.system
            screen.conversation.parameters = choice.parameters
            screen.say("Saved. They apply to the next answer.")
            await screen.save()

    screen.app.push_screen(SettingsScreen(screen.conversation.system, screen.conversation.parameters), save)


async def _set(screen: ChatScreen, argument: str) -> None:
    name, _, text = argument.partition(" ")
    values = screen.conversation.parameters
    if not name:
        text = ", ".join(f"{name} {parameters.format_value(value)}" for name, value in values.items())
        screen.say(f"Set: {text}." if text else "No parameter is set: the model's defaults apply.")
        return
    known = parameters.parameter(name)
    value = parameters.parse(name, text)
    if value is None:
        values.pop(known.name, None)
        screen.say(f"{known.name} is unset: the model's default applies.")
    else:
        values[known.name] = value
        screen.say(f"{known.name} is {parameters.format_value(value)} for the next answer.")
    await screen.save()


async def _system(screen: ChatScreen, text: str) -> None:
    if not text:
        await _settings(screen, "")
        return
    screen.conversation.system = "" if text.lower() == "none" else clean(text)
    screen.say("The system prompt is set." if screen.conversation.system else "The system prompt is removed.")
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
        raise InvalidRequest("An answer is running.", hint="Esc stops it.")
    screen.edit(questions[-1])


async def _stop(screen: ChatScreen, _: str) -> None:
    if not screen.is_answering:
        raise InvalidRequest("No answer is running.")
    await screen.stop()


def _copy(screen: ChatScreen, what: str, message: Message | None) -> None:
    answers = [shown for shown in screen.conversation.path() if shown.role == "assistant" and shown.content]
    message = message or (answers[-1] if answers else None)
    if message is None:
        raise InvalidRequest("There is no answer to copy.")
    first, _, number = what.partition(" ")
    if not what:
        screen.copy(message.content, "The answer")
    elif what == "all":
        screen.copy(export.markdown(screen.conversation), "The conversation")
    elif first == "code":
        blocks = export.code_blocks(message.content)
        index = int(number) if number.isdigit() else len(blocks) if not number else 0
        if not 1 <= index <= len(blocks):
            raise InvalidRequest(
                f"There is no code block {number or 'in this message'}; the message has {len(blocks)}."
            )
        screen.copy(blocks[index - 1], f"Code block {index} of {len(blocks)}")
    else:
        raise InvalidRequest(f"Unknown argument of /copy: {what[:40]!r}.", hint="Try /copy, /copy code 2 or /copy all.")


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
    if name not in themes:
        raise InvalidRequest(
            f"Unknown theme {name[:40]!r}.", hint="Use /theme light or /theme dark; Ctrl+P has more themes."
        )
    screen.app.theme = themes[name]


async def _help(screen: ChatScreen, _: str) -> None:
    screen.app.push_screen(HelpScreen())


async def _quit(screen: ChatScreen, _: str) -> None:
    await screen.app.run_action("quit")


_COMMANDS: dict[str, Callable[[ChatScreen, str], Awaitable[None]]] = {
    "model": _model,
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
