"""Reads the JSON files of a model folder, within bounds of size and complexity."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ModelRefused
from . import json_text
from .tensor_files import refusing_unreadable, regular_size

MAX_JSON = 32 * 1024 * 1024  # bytes


def read_json(file: Path) -> Mapping[str, Any]:
    """The JSON object in a file of at most MAX_JSON bytes. Raises ModelRefused with the file and the reason."""
    values = _read_value(file)
    if not isinstance(values, dict):
        raise ModelRefused(f"{file.name} must contain a JSON object, not a {type(values).__name__}")
    return values


def read_json_list(file: Path) -> list[Any]:
    """The JSON list in a file. Raises ModelRefused as read_json does."""
    values = _read_value(file)
    if not isinstance(values, list):
        raise ModelRefused(f"{file.name} must contain a JSON list, not a {type(values).__name__}")
    return values


def _read_value(file: Path) -> Any:
    size = regular_size(file)
    if size > MAX_JSON:
        raise ModelRefused(f"{file.name} has {size} bytes; the limit is {MAX_JSON}")
    with refusing_unreadable(file):
        content = file.read_bytes()
    try:
        return json_text.parse(content.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        raise ModelRefused(f"{file.name} is {error}") from error
