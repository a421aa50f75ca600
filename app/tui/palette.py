"""The command palette: commands, models, adapters and earlier conversations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from textual.command import CommandPalette, DiscoveryHit, Hit, Hits, Provider
from textual.content import Content

from ..client import AdapterFolder
from ..errors import AppError, StorageFailed
from . import selection
from .adapters import has_base
from .chat.screen import ChatScreen
from .dialog import ClosesOnce
from .filtered import marked
from .text import one_line

CHAT_SCORE = 0.1  # of a conversation that has the words in a message, but not in its title


class Palette(CommandPalette, ClosesOnce[None]):
    """The palette of commands, or of themes."""


class Target(NamedTuple):
    """A thing that the palette finds."""

    title: str
    action: Callable[[], object]
    sentence: str


class Finder(Provider):
    """Finds models, adapters and conversations, for the chat screen."""

    @property
    def _chat(self) -> ChatScreen:
        assert isinstance(self.screen, ChatScreen)
        return self.screen

    async def startup(self) -> None:
        self._folders: list[AdapterFolder] = []
        with suppress(AppError):  # the status line shows that there is no daemon
            self._folders = await self._chat.connection.adapter_folders()

    async def discover(self) -> Hits:
        for target in self._targets():
            yield DiscoveryHit(Content(target.title), target.action, target.title, target.sentence)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for target in [*self._targets(), *await _chats(self._chat, query)]:
            score = matcher.match(target.title) or (CHAT_SCORE if target.title.startswith("Chat ") else 0.0)
            if score:
                yield Hit(score, marked(target.title, matcher), target.action, target.title, target.sentence)

    def _targets(self) -> list[Target]:
        return [*_models(self._chat), *_adapters(self._chat, self._folders)]


def _models(chat: ChatScreen) -> list[Target]:
    names = [entry.id for entry in chat.connection.entries if not entry.problem]
    return [Target(f"Model {one_line(name, 80)}", partial(chat.use_model, name), "Use this model.") for name in names]


def _adapters(chat: ChatScreen, folders: list[AdapterFolder]) -> list[Target]:
    """The adapters of the model of the conversation. An adapter that is not loaded is loaded first."""
    model = chat.conversation.model
    entries = chat.connection.adapters_of(model)
    loaded = {entry.path for entry in entries}
    names = [entry.name for entry in entries]
    names += [folder.id for folder in folders if folder.path not in loaded and has_base(folder, model)]
    names.append(selection.BASE[0])
    return [
        Target(f"Adapter {one_line(name, 80)}", partial(chat.command, "adapter", name), "Use this adapter.")
        for name in names
    ]


async def _chats(chat: ChatScreen, query: str) -> list[Target]:
    """The earlier conversations with the words of `query`."""
    try:
        entries = await chat.recorder.list(query)
    except StorageFailed:
        return []
    return [
        Target(
            f"Chat {one_line(entry.title or 'untitled', 80)}",
            partial(chat.resume, entry.id),
            entry.excerpt or "Continue this conversation.",
        )
        for entry in entries
        if entry.id != chat.conversation.id
    ]
