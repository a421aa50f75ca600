"""The dialogues that skills generate for the corpus."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


@dataclass
class Exchange:
    """Consecutive messages, with the system prompt and the tools that they need."""

    messages: list[Message]
    system: str = ""
    tools: list[Message] = field(default_factory=list)
    name: str = ""  # the intent of the last question, to select a question that may follow

    @classmethod
    def of(cls, question: str, answer: str, name: str = "") -> Exchange:
        return cls([user(question), assistant(answer)], name=name)
