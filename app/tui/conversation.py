"""A conversation as a tree of messages, of which one path is shown. Knows no widget and no file.

0 user ─┬─ 1 assistant ── 2 user ── 3 assistant
        └─ 4 assistant  (regenerated: an alternative of 1)
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

from .text import one_line

Role = Literal["user", "assistant"]
Finish = Literal["", "stop", "length", "tool_calls", "stopped", "failed"]


@dataclass
class Message:
    """One message. `index` is its place in the conversation's list, `parent` that of the message it answers."""

    index: int
    parent: int | None
    role: Role
    content: str = ""
    reasoning: str = ""
    model: str = ""
    finish: Finish = ""  # assistant: how it ended; "" while it runs. stopped: by the person; failed: see error
    error: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    ttft: float = 0.0  # seconds to the first piece
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Rate after the first token; 0 when there is none to speak of."""
        span = self.seconds - self.ttft
        return (self.completion_tokens - 1) / span if self.completion_tokens > 1 and span > 0 else 0.0


@dataclass
class Conversation:
    """Messages in the order of their making; `leaf` is the end of the shown path (None: nothing said yet)."""

    model: str
    system: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    title: str = ""
    messages: list[Message] = field(default_factory=list)
    leaf: int | None = None

    def add(self, role: Role, content: str = "", *, parent: int | None) -> Message:
        """A new message below `parent`; the shown path ends there. The first user message gives the title."""
        message = Message(len(self.messages), parent, role, content, model=self.model if role == "assistant" else "")
        self.messages.append(message)
        self.leaf = message.index
        if role == "user" and not self.title:
            self.title = one_line(content, 48)
        return message

    def path(self, leaf: int | None = None) -> list[Message]:
        """From the first message to `leaf` (the shown one when not given)."""
        at, path = self.leaf if leaf is None else leaf, []
        while at is not None:
            path.append(self.messages[at])
            at = self.messages[at].parent
        return path[::-1]

    def alternatives(self, message: Message) -> list[Message]:
        """The messages that stand at the same place, in the order of their making; the message is one of them."""
        return [other for other in self.messages if other.parent == message.parent and other.role == message.role]

    def show(self, message: Message) -> None:
        """Let the shown path lead through `message` and on to the newest that follows it."""
        at = message.index
        while children := [other.index for other in self.messages if other.parent == at]:
            at = children[-1]
        self.leaf = at

    def request(self, answer: Message) -> list[dict[str, Any]]:
        """What the model is sent for `answer`. Turns without any answer are left out with their question.

        A question whose answer failed at once (too long, stopped early) would else stand before the next one, and
        many chat templates refuse two questions in a row.
        """
        sent = [{"role": "system", "content": self.system}] if self.system.strip() else []
        path = self.path(answer.parent)
        for position, message in enumerate(path):
            last = position == len(path) - 1
            if message.role == "assistant":
                if message.content:
                    sent.append({"role": "assistant", "content": message.content})
            elif last or path[position + 1].content:
                sent.append({"role": "user", "content": message.content})
        return sent
