"""The selection of an adapter as text: NAME or NAME=SCALE. An empty text selects the base model."""

from __future__ import annotations

from ..client import adapter_selection
from .text import joined

PARAMETER = "adapter"  # name of the parameter of a conversation that has the selection
BASE = ("none", "base")  # typed names for the base model


def split(selection: str) -> tuple[str, float]:
    """Name and scale of a selection. Raises InvalidRequest for a malformed one, and for an empty one."""
    entry = adapter_selection(selection)
    return entry["name"], entry["scale"]


def join(name: str, scale: float) -> str:
    """The selection of an adapter. Scale 1 is the default and is omitted."""
    return name if scale == 1 else f"{name}={scale:g}"


def label(selection: str) -> str:
    """The selection as text for the screen, such as `pirate ×0.5`; empty for the base model."""
    name, _, scale = selection.partition("=")
    return f"{name} ×{scale or 1}" if name else ""


def author(model: str, selection: str) -> str:
    """The model and its adapter as text for the screen, such as `guide · pirate ×0.5`."""
    return joined([model, label(selection)])
