"""Chat templates, rendered in a bounded child process.

A chat template is a program that comes with the weights. The sandbox of jinja2 denies it access to the internals of
Python. The child process stops endless loops and huge strings, and limits the damage of an escape from the sandbox.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...bounded import BoundedChild, ChildLost
from ...errors import TemplateFailed
from .child import Rendered

MAX_TEMPLATE = 256 * 1024  # characters; the longest in use have about 20,000
MAX_TEXT = 64 * 2**20  # characters of one rendering
CPU_LIMIT = 1.0  # seconds of processor time of one rendering
WALL_LIMIT = 2.0  # seconds of elapsed time of one rendering
MEMORY_LIMIT = 512 * 2**20  # bytes of address space; the interpreter takes about 60 MB


class TemplateExceeded(TemplateFailed, code=TemplateFailed.code):
    """The template exceeded a limit. Another rendering would exceed it, too, or cost as much."""


class TemplateRenderer:
    """Renders chat templates in one child process. Thread-safe.

    The first rendering, and the first one after an exceeded limit, starts the child process.
    """

    def __init__(self) -> None:
        self._child = BoundedChild(
            "localllm.app.chat.template.child", cpu=CPU_LIMIT, wall=WALL_LIMIT, memory=MEMORY_LIMIT, hello=lambda: b""
        )

    def render(self, template: str, variables: dict[str, Any]) -> str:
        """Render the template with JSON-like variables. Raises TemplateFailed with the reason."""
        if len(template) > MAX_TEMPLATE:
            raise TemplateExceeded(
                _problem(f"it has {len(template)} characters; the limit is {MAX_TEMPLATE}"), param="messages"
            )
        try:
            # Unlike MessagePack, JSON has integers of any size.
            values = msgspec.json.encode(variables)
        except RecursionError:
            raise TemplateExceeded(_problem("the messages or tools are nested too deeply"), param="messages") from None
        # Conversations may be long, so the limit of the output grows with the input.
        max_chars = min(2**20 + 4 * len(values), MAX_TEXT)
        try:
            job = {"template": template, "variables": msgspec.Raw(values), "max_chars": max_chars}
            reply = self._child.call(msgspec.json.encode(job))
        except ChildLost as error:
            raise TemplateExceeded(_problem(str(error)), param="messages") from None
        rendered = msgspec.msgpack.decode(reply, type=Rendered)
        if rendered.problem:
            kind = TemplateExceeded if rendered.exceeded else TemplateFailed
            raise kind(_problem(rendered.problem), param="messages")
        return rendered.text

    def close(self) -> None:
        self._child.close()


def _problem(reason: str) -> str:
    return f"the model's chat template failed: {reason}"
