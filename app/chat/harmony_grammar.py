"""Grammars of answers with tool calls in the format of harmony.py, in the syntax of llguidance."""

from __future__ import annotations

import json
from collections.abc import Sequence

from .harmony import CHANNEL, CONSTRAIN, END, FUNCTIONS, MESSAGE, START

# Only <|channel|>, <|message|>, … are tokens of the grammar; TEXT has no special tokens. The end of the answer may be
# any end-of-sequence token.
_TEXT = ["text: TEXT?", "TEXT: /(?s:.+)/"]


def one_call(functions: Sequence[tuple[str, str]]) -> list[str]:
    """The rules of at most one message of reasoning, then a call. `functions`: name and JSON schema of each tool."""
    return [
        "start: reasoning? call",
        f'reasoning: {CHANNEL} "analysis" {MESSAGE} text {END} {START} "assistant"',
        *_TEXT,
        *_call_rules(functions),
    ]


def text_with_calls(functions: Sequence[tuple[str, str]]) -> list[str]:
    """The rules of any messages, the last of which may be a call. `functions`: as in one_call."""
    return [
        "start: other* (answer | call)",
        f'other: {CHANNEL} ("analysis" | "commentary") {MESSAGE} text {END} {START} "assistant"',
        f'answer: {CHANNEL} "final" {MESSAGE} text',
        *_TEXT,
        *_call_rules(functions),
    ]


def _call_rules(functions: Sequence[tuple[str, str]]) -> list[str]:
    """The rules of a call. The recipient is before or after the channel."""
    rules = [f'content_type: " "? {CONSTRAIN} "json" | " json"']
    for index, (name, schema) in enumerate(functions):
        recipient = json.dumps(f" to={FUNCTIONS}{name}")
        header = f'({CHANNEL} "commentary" {recipient} | {recipient} {CHANNEL} "commentary")'
        rules.append(f"call_{index}: {header} content_type? {MESSAGE} arguments_{index}")
        rules.append(f"arguments_{index}: %json {schema}")
    return ["call: " + " | ".join(f"call_{index}" for index in range(len(functions))), *rules]
