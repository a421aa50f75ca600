"""The skeleton of a conversation: the same roles and calls, with a unique word in place of each text.

Its rendering shows what a chat template does with a conversation, without the text of the client.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from .messages import Conversation

_REPEATED = re.compile(r"(.{1,6}?)\1{2,}", re.DOTALL)


class Score(NamedTuple):
    """How well a prompt shows a skeleton; the greater the better."""

    shown: int  # texts of the messages in the prompt, less those in a wrong notation
    blanks: int  # the negative number of places where the template writes None


@dataclass(frozen=True)
class Skeleton:
    conversation: Conversation
    words: frozenset[str]  # texts that a prompt must show
    keys: frozenset[str]  # keys of arguments
    items: frozenset[str]  # items of arguments that are lists

    def score(self, prompt: str) -> Score:
        bad = sum(f"'{key}'" in prompt or f'\\"{key}' in prompt for key in self.keys)
        bad += sum(f'["{item}"]' not in prompt and f"['{item}']" not in prompt for item in self.items)
        return Score(sum(word in prompt for word in self.words) - bad, -prompt.count("None"))

    def is_complete(self, score: Score) -> bool:
        return score == (len(self.words), 0)

    def tail(self, prompt: str) -> str:
        """The text of the prompt after the last text of a message."""
        ends = [index + len(word) for word in self.words if (index := prompt.rfind(word)) >= 0]
        return prompt[max(ends) :] if ends else ""


def shape_of(conversation: Conversation, *more: object) -> bytes:
    """A key that conversations with the same skeleton share, with `more` values."""
    shapes = [_shape(message) for message in _without_repetitions(conversation.messages)]
    tools = conversation.tools
    kinds = None if tools is None else sorted({_tool_shape(tool) for tool in tools})
    return msgspec.json.encode([shapes, kinds, conversation.arguments, conversation.ids, *more])


def skeleton_of(conversation: Conversation) -> Skeleton:
    """The skeleton of a conversation whose results are in the order of the calls."""
    words = _Words()
    messages = [words.message(message) for message in _without_repetitions(conversation.messages)]
    kinds = sorted({_tool_shape(tool) for tool in conversation.tools or ()})
    tools = [_tool(f"tool{number:05}x", *kind) for number, kind in enumerate(kinds)]
    likeness = replace(conversation, messages=messages, tools=tools or None)
    return Skeleton(likeness, frozenset(words.words), frozenset(words.keys), frozenset(words.items))


def _shape(message: Mapping[str, Any]) -> str:
    calls = [_kind(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    fields = "".join(sorted(key[0] for key in message))
    return f"{message['role']} {bool(message['content'].strip())} {fields} {' '.join(calls)}"


def _kind(arguments: str) -> str:
    """The kind of arguments: `{` object, `[` another value, `x` no JSON, or empty for none."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return "x" if arguments.strip() else ""
    if isinstance(value, str):  # a text in JSON: perhaps it has an object
        return _kind(value) if value.lstrip().startswith("{") else "["
    return "" if value is None or value == {} else "{" if isinstance(value, dict) else "["


def _without_repetitions(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, where a sequence of roles that repeats itself is there twice."""
    letters: dict[str, str] = {}
    before = ""
    text = ""
    for message in messages:
        number = before.rpartition("/")[2] if before.startswith("tool") else "0"
        shape = f"tool/{int(number) + 1}" if message["role"] == "tool" else _shape(message)
        text += letters.setdefault(shape, chr(0x100 + len(letters)))
        before = shape
    kept: list[int] = []
    position = 0
    for match in _REPEATED.finditer(text):
        kept += range(position, match.start() + 2 * len(match[1]))
        position = match.end()
    kept += range(position, len(text))
    return [messages[index] for index in kept]


class _Words:
    """Makes unique words, and messages of them."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.keys: list[str] = []
        self.items: list[str] = []
        self._count = 0
        self._pending: list[tuple[str, str]] = []  # ids of the calls whose results follow, and their new ids

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        calls = message.get("tool_calls", ())
        likeness = dict(message)
        if message.get("reasoning_content"):
            likeness["reasoning_content"] = self._word("thought", shown=False)
        if message["content"].strip():
            # Many templates drop the text beside calls, as they did when the model was trained.
            likeness["content"] = self._word("text", shown=not calls)
        if calls:
            likeness["tool_calls"] = [self._call(call) for call in calls]
            pairs = zip(calls, likeness["tool_calls"], strict=True)
            self._pending = [(call["id"], new["id"]) for call, new in pairs]
        if message["role"] == "tool":
            likeness["name"] = self._word("result", shown=False)
            likeness["tool_call_id"] = self._result_id(message["tool_call_id"])
        return likeness

    def _word(self, kind: str, *, shown: bool = True) -> str:
        self._count += 1
        word = f"{kind}{self._count:05}x"
        if shown:
            self.words.append(word)
        return word

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        name = self._word("function")
        arguments = self._arguments(_kind(call["function"]["arguments"]))
        new = f"call_{self._count:024x}"
        return {"id": new, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _arguments(self, kind: str) -> str:
        if not kind:
            return "{}"
        value = self._word("value")
        if kind == "{":
            key = self._word("key")
            self.keys.append(key)
            return f'{{"{key}": "{value}"}}'
        if kind == "[":
            self.items.append(value)
            return f'["{value}"]'
        return value

    def _result_id(self, name: str) -> str:
        for pair in self._pending:
            if pair[0] == name:
                self._pending.remove(pair)
                return pair[1]
        return name


def _tool_shape(tool: Mapping[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """Whether a tool has a description, and the keys of its schema that templates read."""
    function = tool["function"]
    parameters = function.get("parameters")
    keys = () if parameters is None else ("parameters", *(key for key in ("type", "properties") if key in parameters))
    return bool(function.get("description")), keys


def _tool(name: str, has_description: bool, keys: Sequence[str]) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": "A text."}}}
    if has_description:
        function["description"] = "A tool."
    if keys:
        function["parameters"] = {key: value for key, value in schema.items() if key in keys}
    return {"type": "function", "function": function}
