"""Two colour themes, and the default theme of a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from textual.theme import Theme

DARK = Theme(
    name="localllm-dark",
    dark=True,
    background="#14171c",
    surface="#191d24",
    panel="#232932",
    foreground="#d5dbe4",
    primary="#7fb0d8",
    secondary="#8aa2bd",
    accent="#8fc0a0",
    success="#8fc0a0",
    warning="#d8ab66",
    error="#df8080",
)
LIGHT = Theme(
    name="localllm-light",
    dark=False,
    background="#fbfbf9",
    surface="#f2f2ef",
    panel="#e4e6e3",
    foreground="#23272e",
    primary="#2b6391",
    secondary="#55708a",
    accent="#2f7650",
    success="#2f7650",
    warning="#8f610c",
    error="#ad3434",
)


def default(env: Mapping[str, str]) -> str:
    """The light theme if COLORFGBG (set by several terminals) has a light background, otherwise the dark one."""
    background = env.get("COLORFGBG", "").rpartition(";")[2]
    is_light = background in ("7", "15")
    return LIGHT.name if is_light else DARK.name
