"""Renders dialogues with the chat template of guide, in the same way as transformers and localllm."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE = Path(__file__).parents[2] / "assets" / "guide" / "chat_template.jinja"

CONTEXT = 2048
START = "<|im_start|>"
END = "<|im_end|>"
DOCUMENT_END = "<|endoftext|>"
SPECIAL = (DOCUMENT_END, START, END)
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
ASSISTANT = f"{START}assistant\n"

Message = dict[str, Any]


@dataclass
class Conversation:
    """Messages without the system prompt, the system prompt, and the schemas of the tools."""

    messages: list[Message]
    system: str = ""
    tools: list[Message] = field(default_factory=list)

    def render(self) -> str:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return render([*system, *self.messages], self.tools or None)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


@cache
def _template() -> jinja2.Template:
    def raise_exception(words: str) -> None:
        raise jinja2.TemplateError(words)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(TEMPLATE.read_text("utf-8"))


def render(messages: list[Message], tools: list[Message] | None = None, *, generate: bool = False) -> str:
    """The dialogue as one string. `generate`: the string ends with the start of an answer."""
    return _template().render(messages=messages, tools=tools, add_generation_prompt=generate)
