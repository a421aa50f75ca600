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
    """The messages with ids of a style. The results must be in the order of the calls.

    An id of this style stays. Every other id gets a new one, always the same, and two ids never get the same one.
    """
    if style == "nine":
        return _with_short_ids(messages)
    if style == "functions":
        return _with_names(messages)
    return list(messages)


def _with_short_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    ids = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    short = {name: name for name in ids if _NINE.fullmatch(name)}
    taken = set(short)
    for name in ids:
        if name not in short:
            short[name] = _free_id(name, taken)
            taken.add(short[name])
    return [
        _renamed(message, [short[call["id"]] for call in message.get("tool_calls", ())], short) for message in messages
    ]


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


def _with_names(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    taken = {call["id"] for message in messages for call in message.get("tool_calls", ()) if _is_named(call)}
    kept: set[str] = set()
    count = 0
    pending: list[tuple[str, str]] = []  # old and new ids of the calls whose results follow
    converted = []
    for message in messages:
        calls = message.get("tool_calls", ())
        names = []
        for call in calls:
            names.append(_named_id(call, count, taken, kept))
            count += 1
        if message["role"] != "tool":
            pending = [(call["id"], name) for call, name in zip(calls, names, strict=True)]
            converted.append(_renamed(message, names, {}))
            continue
        pair = next((pair for pair in pending if pair[0] == message["tool_call_id"]), None)
        if pair:
            pending.remove(pair)
        converted.append(_renamed(message, [], dict([pair] if pair else [])))
    return converted


def _is_named(call: dict[str, Any]) -> bool:
    prefix, _, number = str(call["id"]).rpartition(":")
    return prefix == f"functions.{call['function']['name']}" and number.isascii() and number.isdigit()


def _named_id(call: dict[str, Any], number: int, taken: set[str], kept: set[str]) -> str:
    """The id of a call that has a number; another number if a different call has this one."""
    if _is_named(call) and call["id"] not in kept:
        kept.add(call["id"])
        return str(call["id"])
    while (name := f"functions.{call['function']['name']}:{number}") in taken:
        number += 1
    taken.add(name)
    return name


def _renamed(message: dict[str, Any], ids: Sequence[str], results: dict[str, str]) -> dict[str, Any]:
    """The message with these ids of its calls; `results` has the new ids of results."""
    if message.get("tool_calls"):
        calls = [call | {"id": name} for call, name in zip(message["tool_calls"], ids, strict=True)]
        return message | {"tool_calls": calls}
    if message["role"] == "tool":
        return message | {"tool_call_id": results.get(message["tool_call_id"], message["tool_call_id"])}
    return message
