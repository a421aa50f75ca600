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
    """The current branch as Markdown, with a heading for each message."""
    paragraphs = [f"# {conversation.title or 'Conversation'}"]
    if conversation.system.strip():
        paragraphs += ["**System prompt**", conversation.system.strip()]
    for message in conversation.path():
        name = "You" if message.role == "user" else message.author
        notes = {"stopped": "stopped", "length": "reached the length limit", "failed": message.error}
        paragraphs += [f"## {name}", message.content.strip()]
        if message.finish in notes:
            paragraphs.append(f"*({notes[message.finish]})*")
    return "\n\n".join(paragraphs) + "\n"


def as_json(conversation: Conversation) -> str:
    """The complete conversation as JSON, with all branches."""
    return json.dumps(asdict(conversation), ensure_ascii=False, indent=2) + "\n"


def write(conversation: Conversation, argument: str, folder: Path) -> Path:
    """Write the conversation to a file and return its path. `argument` is "[md|json] [file]", relative to `folder`.

    Never overwrites a file. Raises InvalidRequest or StorageFailed.
    """
    if not conversation.messages:
        raise InvalidRequest("There is nothing to export.")
    kind, name = _kind_and_name(argument)
    file = folder / Path(name or f"{_slug(conversation.title)}.{kind}").expanduser()
    text = as_json(conversation) if kind == "json" else markdown(conversation)
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise InvalidRequest(f"{file} already exists.", hint=f"Use another name: /export {kind} FILE") from None
    except OSError as error:
        raise StorageFailed(
            f"Cannot write {file}: {error.strerror}.", hint="Use another folder: /export [md|json] FILE"
        ) from None
    return file


def _kind_and_name(argument: str) -> tuple[str, str]:
    """(md or json, file name) of the argument of /export; the name may be empty."""
    kind, _, name = argument.partition(" ")
    if kind in ("md", "json"):
        return kind, name.strip()
    name = argument.strip()
    return "json" if name.endswith(".json") else "md", name


def code_blocks(text: str) -> list[str]:
    """The text of each code block of a Markdown text."""
    tokens = MarkdownIt("gfm-like", {"html": False}).parse(text)
    return [token.content.rstrip("\n") for token in tokens if token.type in ("fence", "code_block")]


def _slug(title: str) -> str:
    return re.sub(r"[^\w]+", "-", title.lower()).strip("-")[:48] or "conversation"
