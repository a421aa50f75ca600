"""A conversation: a tree of messages; the UI shows one branch, the current one. Independent of widgets and files.

0 user ─┬─ 1 assistant ── 2 user ── 3 assistant
        └─ 4 assistant  (regenerated: an alternative of 1)
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

from . import selection
from .text import one_line

Role = Literal["user", "assistant"]
Finish = Literal["", "stop", "length", "tool_calls", "stopped", "failed"]


@dataclass
class Message:
    """One message. `index` is its position in the conversation; `parent` is the index of the message before it."""

    index: int
    parent: int | None
    role: Role
    content: str = ""
    reasoning: str = ""
    model: str = ""
    adapter: str = ""  # selection of the adapter that an answer uses; empty: none
    finish: Finish = ""  # end of an answer; "": not finished, stopped: by the user, failed: see `error`
    error: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    ttft: float = 0.0  # seconds to the first token
    seconds: float = 0.0

    @property
    def author(self) -> str:
        """The model of an answer and its adapter, as text for the screen."""
        return selection.author(self.model, self.adapter)

    @property
    def tokens_per_second(self) -> float:
        """Decode rate: tokens after the first, divided by the time after the first; 0 if there are none."""
        span = self.seconds - self.ttft
        return max(0, self.completion_tokens - 1) / span if span > 0 else 0.0


@dataclass
class Conversation:
    """A tree of messages, in order of creation. `leaf` is the end of the current branch (None: no messages)."""

    model: str
    system: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    title: str = ""
    messages: list[Message] = field(default_factory=list)
    leaf: int | None = None

    @property
    def adapter(self) -> str:
        """The selection of the adapter for the next answer; empty: none."""
        return str(self.parameters.get(selection.PARAMETER, ""))

    @adapter.setter
    def adapter(self, value: str) -> None:
        self.parameters.pop(selection.PARAMETER, None)
        if value:
            self.parameters[selection.PARAMETER] = value

    def add(self, role: Role, content: str = "", *, parent: int | None) -> Message:
        """Add a message below `parent` as the end of the current branch. The first user message sets the title."""
        message = Message(len(self.messages), parent, role, content)
        if role == "assistant":
            message.model = self.model
            message.adapter = self.adapter
        self.messages.append(message)
        self.leaf = message.index
        if role == "user" and not self.title:
            self.title = one_line(content, 48)
        return message

    def path(self, leaf: int | None = None) -> list[Message]:
        """The messages from the first one to `leaf` (default: the end of the current branch)."""
        index = self.leaf if leaf is None else leaf
        path = []
        while index is not None:
            path.append(self.messages[index])
            index = self.messages[index].parent
        return path[::-1]

    def alternatives(self, message: Message) -> list[Message]:
        """The messages with the same parent and role, in order of creation, including `message`."""
        return [other for other in self.messages if other.parent == message.parent and other.role == message.role]

    def place(self, message: Message) -> tuple[int, int]:
        """(n, m): the message is alternative n of m."""
        indices = [other.index for other in self.alternatives(message)]
        return indices.index(message.index) + 1, len(indices)

    def show(self, message: Message) -> None:
        """Make the branch through `message` current. Below it, the branch follows the last reply to each message."""
        last_reply = {other.parent: other.index for other in self.messages}
        leaf = message.index
        while leaf in last_reply:
            leaf = last_reply[leaf]
        self.leaf = leaf

    def request(self, answer: Message) -> list[dict[str, Any]]:
        """The messages of a request for `answer`. A question with an empty answer is omitted, and so is the answer.

        If only the answer were omitted, two user messages would follow each other: many chat templates reject that.
        """
        path = self.path(answer.parent)
        empty = [message for message in path if message.role == "assistant" and not message.content]
        omitted = {index for message in empty for index in (message.parent, message.index)}
        messages = [
            {"role": message.role, "content": message.content} for message in path if message.index not in omitted
        ]
        system = [{"role": "system", "content": self.system}] if self.system.strip() else []
        return [*system, *messages]
