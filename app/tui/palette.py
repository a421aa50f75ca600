"""The command palette: commands, models, adapters and earlier conversations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from textual.command import CommandPalette, DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.fuzzy import Matcher

from ..client import AdapterFolder
from ..errors import AppError, StorageFailed
from . import selection
from .adapters import has_base
from .chat.screen import ChatScreen
from .dialog import ClosesOnce
from .text import one_line

CHAT_SCORE = 0.1  # of a conversation that has the words in a message, but not in its title


class Palette(CommandPalette, ClosesOnce[None]):
    """The palette of commands, or of themes."""


class Target(NamedTuple):
    """A thing that the palette finds."""

    title: str
    action: Callable[[], object]
    sentence: str


def finder(chat: ChatScreen) -> type[Provider]:
    """The provider that finds models, adapters and conversations. Other screens than the chat have no results."""

    class Finder(Provider):
        async def startup(self) -> None:
            self._folders = await _folders(chat)

        async def discover(self) -> Hits:
            for target in self._targets():
                yield DiscoveryHit(Content(target.title), target.action, target.title, target.sentence)

        async def search(self, query: str) -> Hits:
            matcher = self.matcher(query)
            for target in [*self._targets(), *await self._chats(query)]:
                score = matcher.match(target.title) or (CHAT_SCORE if target.title.startswith("Chat ") else 0.0)
                if score:
                    yield Hit(score, _marked(target.title, matcher), target.action, target.title, target.sentence)

        def _targets(self) -> list[Target]:
            return [*_models(chat), *_adapters(chat, self._folders)] if self.screen is chat else []

        async def _chats(self, query: str) -> list[Target]:
            return await _chats(chat, query) if self.screen is chat else []

    return Finder


async def _folders(chat: ChatScreen) -> list[AdapterFolder]:
    try:
        return await chat.connection.adapter_folders()
    except AppError:
        return []  # the status line shows that there is no daemon


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
    others = [entry for entry in entries if entry.id != chat.conversation.id]
    return [
        Target(
            f"Chat {one_line(entry.title or 'untitled', 80)}",
            partial(chat.resume, entry.id),
            entry.excerpt or "Continue this conversation.",
        )
        for entry in others
    ]


def _marked(title: str, matcher: Matcher) -> Content:
    """The title with the matching characters marked. Matcher.highlight would parse it as markup."""
    content = Content(title)
    _, offsets = matcher.fuzzy_search.match(matcher.query, title)
    for offset in offsets:
        content = content.stylize(matcher.match_style, offset, offset + 1)
    return content
