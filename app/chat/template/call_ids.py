"""The ids of tool calls that chat templates accept, and the ids of new calls."""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

# plain: any id. nine: nine letters or digits, as templates of Mistral require. functions: `functions.NAME:NUMBER`, for
# templates such as those of Kimi that show the id in place of the name.
IdStyle = Literal["plain", "nine", "functions"]

_LETTERS = string.ascii_letters + string.digits
_NINE = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class CallIds:
    """The ids of the calls of an answer. `count`: number of calls in the messages before it."""

    style: IdStyle = "plain"
    count: int = 0

    def new(self, index: int, name: str) -> str:
        """A new id for the call of a function; `index` is its number in the answer."""
        if self.style == "functions":
            return f"functions.{name}:{self.count + index}"
        if self.style == "nine":
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def call_count(messages: Iterable[dict[str, Any]]) -> int:
    """Number of tool calls in messages."""
    return sum(len(message.get("tool_calls", ())) for message in messages)


def with_ids(messages: Sequence[dict[str, Any]], style: IdStyle) -> list[dict[str, Any]]:
    """The messages with ids of a style. The results follow their calls, in the same order.

    An id of this style stays. Every other id gets a new one, always the same, and two ids never get the same one.
    """
    if style == "plain":
        return list(messages)
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    ids = iter(_short_ids(calls) if style == "nine" else _named_ids(calls))
    converted = []
    pending: list[tuple[str, str]] = []  # old and new ids of the calls whose results follow
    for message in messages:
        if message["role"] == "tool":
            converted.append(_with_result_id(message, pending))
            continue
        pending = [(call["id"], next(ids)) for call in message.get("tool_calls", ())]
        converted.append(_with_call_ids(message, [new for _, new in pending]))
    return converted


def _with_result_id(message: dict[str, Any], pending: list[tuple[str, str]]) -> dict[str, Any]:
    """A result with the new id of its call, which is removed from `pending`."""
    for index, (old, new) in enumerate(pending):
        if old == message["tool_call_id"]:
            del pending[index]
            return message | {"tool_call_id": new}
    return message


def _with_call_ids(message: dict[str, Any], ids: Sequence[str]) -> dict[str, Any]:
    if not ids:
        return message
    return message | {"tool_calls": [call | {"id": new} for call, new in zip(message["tool_calls"], ids, strict=True)]}


def _short_ids(calls: Sequence[dict[str, Any]]) -> list[str]:
    names = [call["id"] for call in calls]
    short = {name: name for name in names if _NINE.fullmatch(name)}
    taken = set(short)
    for name in names:
        if name not in short:
            short[name] = _free_id(name, taken)
            taken.add(short[name])
    return [short[name] for name in names]


def _free_id(name: str, taken: set[str]) -> str:
    """The first id of the name that is not taken."""
    attempt = 0
    while (short := _short(name, attempt)) in taken:
        attempt += 1
    return short


def _short(name: str, attempt: int) -> str:
    number = int.from_bytes(hashlib.sha256(f"{attempt}:{name}".encode()).digest())
    digits = []
    for _ in range(9):
        number, digit = divmod(number, len(_LETTERS))
        digits.append(_LETTERS[digit])
    return "".join(digits)


def _named_ids(calls: Sequence[dict[str, Any]]) -> list[str]:
    taken = {call["id"] for call in calls if _is_named(call)}
    names: dict[str, None] = {}  # in the order of the calls
    number = 0  # never decreases: the time is linear in the number of calls
    for index, call in enumerate(calls):
        name = call["id"]
        if not _is_named(call) or name in names:
            number = _free_number(call["function"]["name"], max(number, index), taken)
            name = f"functions.{call['function']['name']}:{number}"
            taken.add(name)
        names[name] = None
    return list(names)


def _is_named(call: dict[str, Any]) -> bool:
    prefix, _, number = str(call["id"]).rpartition(":")
    return prefix == f"functions.{call['function']['name']}" and number.isascii() and number.isdigit()


def _free_number(function: str, number: int, taken: set[str]) -> int:
    while f"functions.{function}:{number}" in taken:
        number += 1
    return number
