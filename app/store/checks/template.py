"""Tries the chat template of a model on small conversations, in the sandbox that also renders real ones."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from ....engine.errors import ModelRefused
from ...chat.template.renderer import TemplateRenderer
from ...chat.tokenizer import gguf_metadata
from ...chat.tokenizer.files import chat_templates, read_json
from ...chat.tokenizer.merge import special_tokens
from ...errors import TemplateFailed
from ..records import TemplateVerdict
from .headers import read_gguf_file

TOKENIZER_CONFIG = "tokenizer_config.json"
QUESTION = {"role": "user", "content": "question-4711"}
SYSTEM = {"role": "system", "content": "instruction-4712"}
TOOL = {
    "type": "function",
    "function": {
        "name": "tool_4713",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def try_folder(folder: Path) -> TemplateVerdict:
    """The verdict on the chat template of a model folder."""
    try:
        config = read_json(folder / TOKENIZER_CONFIG)
        templates = chat_templates(folder, config)
        tokens = special_tokens(folder)
    except ModelRefused as error:
        return TemplateVerdict("fails", str(error))
    return try_templates(templates, tokens)


def try_gguf(file: Path) -> TemplateVerdict:
    """The verdict on the chat templates in the metadata of a GGUF file."""
    try:
        metadata = read_gguf_file(file).metadata
    except ModelRefused as error:
        return TemplateVerdict("fails", str(error))
    return try_templates(gguf_metadata.chat_templates(metadata), gguf_metadata.example_tokens(metadata))


def try_templates(templates: Mapping[str, str], variables: Mapping[str, Any]) -> TemplateVerdict:
    """The verdict on chat templates by name. `variables`: the special tokens."""
    if not templates:
        return TemplateVerdict("missing")
    default = templates.get("default") or next(iter(templates.values()))
    with closing(TemplateRenderer()) as renderer:
        try:
            text = _render(renderer, default, variables, [QUESTION])
        except TemplateFailed as error:
            return TemplateVerdict("fails", error.message)
        if QUESTION["content"] not in text:
            return TemplateVerdict("fails", "the prompt lacks the message of the user")
        return TemplateVerdict(
            "works",
            system=_shows(renderer, default, variables, SYSTEM["content"], [SYSTEM, QUESTION], None),
            tools=_shows(renderer, templates.get("tool_use") or default, variables, "tool_4713", [QUESTION], [TOOL]),
        )


def _shows(
    renderer: TemplateRenderer,
    template: str,
    variables: Mapping[str, Any],
    expected: str,
    messages: list[dict[str, str]],
    tools: list[dict[str, Any]] | None,
) -> bool:
    """Whether the template renders a conversation to a text that contains `expected`."""
    try:
        return expected in _render(renderer, template, variables, messages, tools)
    except TemplateFailed:
        return False


def _render(
    renderer: TemplateRenderer,
    template: str,
    variables: Mapping[str, Any],
    messages: list[dict[str, str]],
    tools: list[dict[str, Any]] | None = None,
) -> str:
    values = {"messages": messages, "tools": tools, "add_generation_prompt": True}
    return renderer.render(template, {**variables, **values})
