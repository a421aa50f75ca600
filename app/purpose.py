"""The purpose of a model: to chat, to complete text, or to compute embeddings; and the errors about another use."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from .errors import WrongKind

if TYPE_CHECKING:
    from ..engine.files.pooling import Pooling

Purpose = Literal["chat", "base", "embedding"]
Use = Literal["chat", "text"]  # kind of answer: a reply to messages, or the completion of a text


def purpose_of(templates: Mapping[str, str], pooling: Pooling | None, *, headless: bool = False) -> Purpose:
    """`templates`: the chat templates by name. `headless`: without the weights of an output head.

    A chat template decides if localllm does not compute the pooling.
    """
    if headless or (pooling is not None and not (pooling.problem and templates)):
        return "embedding"
    return "chat" if templates else "base"


def check_use(model: str, purpose: Purpose, use: Use) -> None:
    """Raises WrongKind if a model is not for this use. `model`: its id."""
    if purpose == "embedding":
        raise WrongKind(
            f"{model} is an embedding model: it computes vectors, and generates no text",
            hint="POST /v1/embeddings computes the vectors of texts",
            param="model",
        )
    if (purpose, use) == ("base", "chat"):
        raise WrongKind(
            f"{model} is a base model without a chat template: it completes text, and does not chat",
            hint=f"{completion(model)} completes a text; so does POST /v1/completions",
            param="model",
        )


def completion(model: str) -> str:
    """A command that completes a text."""
    return f'localllm run {shlex.quote(model)} "Once upon a time"'
