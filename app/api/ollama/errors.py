"""Errors in the form of Ollama: one text."""

from __future__ import annotations

import msgspec

from ...errors import AppError


class ErrorText(msgspec.Struct):
    """An error. `code` is not in Ollama's API."""

    error: str
    code: str


def error_body(error: AppError) -> bytes:
    text = f"{error.message} ({error.hint})" if error.hint else error.message
    return msgspec.json.encode(ErrorText(text, error.code))
