"""The text of a conversation without messages."""

from __future__ import annotations

from textual.content import Content

from .header import TINY

KEYS = "\n\nEnter sends · Ctrl+J new line · Esc stops · / commands · F1 help"


def welcome(model: str, bundled: bool) -> Content:
    """`bundled`: the model is the built-in one."""
    if not bundled:
        return Content.assemble(("What would you like to know?", "bold"), KEYS)
    return Content.assemble(
        (f"This is {model}, a {TINY}.", "bold"),
        " It answers questions about localllm, knows little else, and makes mistakes.",
        "\n\n",
        ("F2", "bold"),
        " suggests larger models that fit this machine, and downloads them.",
        KEYS,
    )
