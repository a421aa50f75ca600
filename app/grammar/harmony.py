"""Grammars of answers with tool calls in the format of chat/output/harmony.py, in the syntax of llguidance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..chat.calls.harmony import ANSWER_HEADER, CHANNEL, CONSTRAIN, END, FUNCTIONS, MESSAGE, START

Expression = Callable[[str], str]  # text → the same text in the syntax of a grammar, with control tokens by id

# Only <|channel|>, <|message|>, … are tokens of the grammar; TEXT has no control tokens. The end of the answer may be
# any end-of-sequence token.
_TEXT = ["text: TEXT?", "TEXT: /(?s:.+)/"]


def one_call(functions: Sequence[tuple[str, str]], expression: Expression) -> list[str]:
    """The rules of at most one message of reasoning, then a call. `functions`: name and JSON schema of each tool."""
    return [
        "start: reasoning? call",
        f"reasoning: {_message(expression, 'analysis')}",
        *_TEXT,
        *_call_rules(functions, expression),
    ]


def text_with_calls(functions: Sequence[tuple[str, str]], expression: Expression) -> list[str]:
    """The rules of any number of messages. The last one may be a call. `functions`: as in one_call."""
    return [
        "start: other* (answer | call)",
        f"other: {_message(expression, 'analysis')} | {_message(expression, 'commentary')}",
        f"answer: {expression(ANSWER_HEADER)} text",
        *_TEXT,
        *_call_rules(functions, expression),
    ]


def _message(expression: Expression, channel: str) -> str:
    """A message that another one follows."""
    return f"{expression(f'{CHANNEL}{channel}{MESSAGE}')} text {expression(f'{END}{START}assistant')}"


def _call_rules(functions: Sequence[tuple[str, str]], expression: Expression) -> list[str]:
    """The rules of a call. The recipient is before or after the channel."""
    rules = [f'content_type: " "? {expression(f"{CONSTRAIN}json")} | " json"']
    commentary = f"{CHANNEL}commentary"
    for index, (name, schema) in enumerate(functions):
        recipient = f" to={FUNCTIONS}{name}"
        header = f"({expression(commentary + recipient)} | {expression(recipient + commentary)})"
        rules.append(f"call_{index}: {header} content_type? {expression(MESSAGE)} arguments_{index}")
        rules.append(f"arguments_{index}: %json {schema}")
    return ["call: " + " | ".join(f"call_{index}" for index in range(len(functions))), *rules]
