"""The skeleton of a conversation: the same roles and calls, with a unique word in place of each text.

Its rendering shows what a chat template does with a conversation, without the text of the client. A part that repeats
itself is there once, so that the skeleton of a long session is short, and the same after each further round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from .messages import Conversation

Message = dict[str, Any]
Round = list[Message]  # a message and the results of its calls

MAX_TAIL = 4096  # characters


class Score(NamedTuple):
    """A measure of how well a prompt shows a skeleton. The greatest is the best."""

    shown: int  # texts of the messages in the prompt, less those in a wrong notation
    blanks: int  # the negative number of places where the template writes None


@dataclass(frozen=True)
class Skeleton:
    conversation: Conversation
    words: frozenset[str]  # texts that a prompt must show
    keys: frozenset[str]  # keys of arguments
    items: frozenset[str]  # items of arguments that are lists

    def score(self, prompt: str) -> Score:
        shown = sum(word in prompt for word in self.words)
        no_objects = sum(f"'{key}'" in prompt or f'\\"{key}' in prompt for key in self.keys)
        no_lists = sum(f'["{item}"]' not in prompt and f"['{item}']" not in prompt for item in self.items)
        return Score(shown - no_objects - no_lists, -prompt.count("None"))

    @property
    def complete(self) -> Score:
        """The score of a prompt that shows everything."""
        return Score(len(self.words), 0)

    def tail(self, prompt: str) -> str:
        """The text of the prompt after the last text of a message; its end if it is long."""
        end = max((prompt.rfind(word) + len(word) for word in self.words if word in prompt), default=len(prompt))
        return prompt[end:][-MAX_TAIL:]


def shape_of(conversation: Conversation, variables: Mapping[str, Any]) -> bytes:
    """A key of few bytes that conversations with the same skeleton, and the same variables, share."""
    shapes = [_shape_of_round(part) for part in _without_repetitions(conversation.messages)]
    kinds = None if conversation.tools is None else _kinds(conversation)
    return hashlib.sha256(msgspec.json.encode([shapes, kinds, variables])).digest()


def skeleton_of(conversation: Conversation) -> Skeleton:
    """The skeleton of a conversation whose results are in the order of the calls."""
    words = _Words()
    messages = [message for part in _without_repetitions(conversation.messages) for message in words.round(part)]
    tools = [_tool(f"tool{number:05}x", *kind) for number, kind in enumerate(_kinds(conversation))]
    likeness = replace(conversation, messages=messages, tools=tools or None)
    return Skeleton(likeness, frozenset(words.words), frozenset(words.keys), frozenset(words.items))


def _without_repetitions(messages: Sequence[Message]) -> list[Round]:
    """The rounds without those that repeat a part.

    Each shape of two successive rounds stays, at its first place. A part without a new one is dropped if it ends with
    the two rounds before it, so that successive rounds are successive in the conversation, too.
    """
    kept: list[Round] = []
    known: set[tuple[str, str]] = set()
    path: dict[tuple[str, str], Round] = {}  # the last new shape of two rounds, and those after it
    before = ""
    for part in _rounds(messages):
        shape = _shape_of_round(part)
        pair = (before, shape)
        if pair not in known:
            known.add(pair)
            kept += path.values()
            path = {}
        while pair in path:
            path.popitem()
        path[pair] = part
        before = shape
    return [*kept, *path.values()]


def _rounds(messages: Sequence[Message]) -> list[Round]:
    rounds: list[Round] = []
    for message in messages:
        if message["role"] == "tool" and rounds:
            rounds[-1].append(message)
        else:
            rounds.append([message])
    return rounds


def _shape_of_round(part: Round) -> str:
    """Roles, fields and kinds of calls; whether there is a text, except of results."""
    message = part[0]
    calls = [_kind(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return f"{message['role']} {bool(message['content'].strip())} {sorted(message)} {calls} {len(part)}"


def _kind(arguments: str) -> str:
    """The kind of arguments: `{` object, `[` another value, `x` no JSON, or empty for none."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return "x" if arguments.strip() else ""
    if isinstance(value, str) and value.lstrip().startswith("{"):  # a text in JSON: perhaps it has an object
        return _kind(value)
    if value in (None, {}):
        return ""
    return "{" if isinstance(value, dict) else "["


class _Words:
    """Makes unique words, and rounds of them."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.keys: list[str] = []
        self.items: list[str] = []
        self._count = 0

    def round(self, part: Round) -> Round:
        first = self._message(part[0])
        ids = [call["id"] for call in first.get("tool_calls", ())] + [""] * len(part)
        return [first, *(self._result(result, call) for result, call in zip(part[1:], ids, strict=False))]

    def _message(self, message: Message) -> Message:
        likeness = dict(message)
        calls = message.get("tool_calls", ())
        if message.get("reasoning_content"):
            likeness["reasoning_content"] = self._word("thought")
        if message["content"].strip():
            likeness["content"] = self._word("text")
            if not calls:  # many templates drop the text beside calls, as they did when the model was trained
                self.words.append(likeness["content"])
        if calls:
            likeness["tool_calls"] = [self._call(_kind(call["function"]["arguments"])) for call in calls]
        return likeness

    def _result(self, message: Message, call: str) -> Message:
        return self._message(message) | {"name": self._word("result"), "tool_call_id": call}

    def _word(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._count:05}x"

    def _call(self, kind: str) -> dict[str, Any]:
        name = self._word("function")
        self.words.append(name)
        identifier = f"call_{self._count:024x}"
        return {"id": identifier, "type": "function", "function": {"name": name, "arguments": self._arguments(kind)}}

    def _arguments(self, kind: str) -> str:
        if not kind:
            return "{}"
        value = self._word("value")
        self.words.append(value)
        if kind == "{":
            key = self._word("key")
            self.keys.append(key)
            return f'{{"{key}": "{value}"}}'
        if kind == "[":
            self.items.append(value)
            return f'["{value}"]'
        return value


def _kinds(conversation: Conversation) -> list[tuple[bool, tuple[str, ...]]]:
    """The different results of `_kind_of_tool` for the tools of a conversation."""
    return sorted(set(map(_kind_of_tool, conversation.tools or ())))


def _kind_of_tool(tool: Mapping[str, Any]) -> tuple[bool, tuple[str, ...]]:
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
