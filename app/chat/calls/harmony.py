"""The markers of the format of gpt-oss (OpenAI Harmony), which output/harmony.py reads."""

from __future__ import annotations

from collections.abc import Callable

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
CONSTRAIN = "<|constrain|>"
END = "<|end|>"
RETURN = "<|return|>"
CALL = "<|call|>"
ENDS = frozenset({END, RETURN, CALL})  # each of them ends a message
MARKERS = frozenset({START, CHANNEL, MESSAGE, CONSTRAIN}) | ENDS
ANSWER_HEADER = f"{CHANNEL}final{MESSAGE}"  # after it, the model writes the answer without reasoning
FUNCTIONS = "functions."


def uses_harmony(template: str, id_of: Callable[[str], int | None]) -> bool:
    """True if the model writes this format: the template and the vocabulary have its markers."""
    return all(marker in template and id_of(marker) is not None for marker in (START, CHANNEL, MESSAGE))


def end_ids(id_of: Callable[[str], int | None]) -> frozenset[int]:
    """The tokens of the vocabulary that end an answer in this format; empty if the vocabulary lacks a marker."""
    ids = {marker: id_of(marker) for marker in MARKERS}
    if None in ids.values():
        return frozenset()
    return frozenset(token for marker, token in ids.items() if marker in (RETURN, CALL) and token is not None)
