"""Exports a conversation to a Markdown or JSON file; finds the code blocks of an answer."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

from markdown_it import MarkdownIt

from ..errors import InvalidRequest, StorageFailed
from .conversation import Conversation


def markdown(conversation: Conversation) -> str:
    """The visible path as Markdown, with a heading for each message."""
    parts = [f"# {conversation.title or 'Conversation'}"]
    if conversation.system.strip():
        parts.append(f"**System prompt**\n\n{conversation.system.strip()}")
    for message in conversation.path():
        name = "You" if message.role == "user" else message.model
        notes = {
            "stopped": "\n\n*(stopped)*",
            "length": "\n\n*(reached the length limit)*",
            "failed": f"\n\n*({message.error})*",
        }
        parts.append(f"## {name}\n\n{message.content.strip()}{notes.get(message.finish, '')}")
    return "\n\n".join(parts) + "\n"


def as_json(conversation: Conversation) -> str:
    """The whole conversation as JSON, with all branches."""
    return json.dumps(asdict(conversation), ensure_ascii=False, indent=2) + "\n"


def write(conversation: Conversation, argument: str, folder: Path) -> Path:
    """Write the conversation to a file and return its path. `argument` is "[md|json] [file]", relative to `folder`.

    Never overwrites a file. Raises InvalidRequest or StorageFailed.
    """
    first, _, rest = argument.partition(" ")
    name = rest.strip() if first in ("md", "json") else argument.strip()
    kind = first if first in ("md", "json") else "json" if name.endswith(".json") else "md"
    if not conversation.messages:
        raise InvalidRequest("There is nothing to export.")
    file = folder / Path(name).expanduser() if name else folder / f"{_slug(conversation.title)}.{kind}"
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(as_json(conversation) if kind == "json" else markdown(conversation))
    except FileExistsError:
        raise InvalidRequest(f"{file} already exists.", hint=f"Use another name: /export {kind} FILE") from None
    except OSError as error:
        raise StorageFailed(f"Cannot write {file}: {error.strerror}.", hint="/export [md|json] FILE") from None
    return file


def code_blocks(text: str) -> list[str]:
    """The code blocks of a Markdown text."""
    tokens = MarkdownIt("gfm-like", {"html": False}).parse(text)
    return [token.content.rstrip("\n") for token in tokens if token.type in ("fence", "code_block")]


def _slug(title: str) -> str:
    return re.sub(r"[^\w]+", "-", title.lower()).strip("-")[:48] or "conversation"
