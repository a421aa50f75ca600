"""What skills hand to the corpus."""

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
    """Messages that belong together, and what they need around them."""

    messages: list[Message]
    system: str = ""
    tools: list[Message] = field(default_factory=list)
    name: str = ""  # of the intent, so that a follow-up can be chosen

    @classmethod
    def of(cls, question: str, answer: str, name: str = "") -> Exchange:
        return cls([user(question), assistant(answer)], name=name)
