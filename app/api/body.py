"""Reads and decodes the JSON body of a request, with limits. Errors name the invalid field."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.types import Receive, Scope

from ..errors import BodyTooLarge, InvalidRequest, UnsupportedMedia, UnsupportedParameter
from .structure import check_structure

MAX_DEPTH = 64  # maximum depth of nested values in tools, schemas and template variables
READ_SECONDS = 60.0  # maximum time between two chunks of a body
# A body that is too large is read and dropped up to these limits, before the connection closes.
MAX_DISCARDED = 2**23  # bytes
DISCARD_SECONDS = 2.0
# Content-Encoding -> parameter of zlib; None: not compressed.
ENCODINGS: Mapping[bytes, int | None] = {b"identity": None, b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
LARGE = 2**16  # bytes; a thread decodes a larger body, so that the event loop serves other requests


class WireBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the bodies that clients send. Unknown fields are refused."""

    REFUSED: ClassVar[dict[str, str]] = {}  # field → reason why its values are refused


Body = TypeVar("Body", bound=WireBody)
Decoded = TypeVar("Decoded")
Converted = TypeVar("Converted")

# msgspec names the field and the reason of an error only in its text: its errors have no attributes.
_WHERE = re.compile(r" - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)
_PART_TYPE = re.compile(r"content\[\d+\]\.type$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`$")


class ClientGone(Exception):
    """The client closed its connection, so there is no reply to send."""


def is_local(scope: Scope) -> bool:
    """True if the request came over the unix socket."""
    return scope["server"] is not None and scope["server"][1] is None


async def read_json(scope: Scope, receive: Receive, kind: type[Body], limit: int) -> Body:
    """Read the body and decode it as `kind`. Raises an AppError that names the invalid field, or ClientGone."""
    body, _ = await read_converted(scope, receive, kind, limit, lambda body: None)
    return body


async def read_converted(
    scope: Scope,
    receive: Receive,
    kind: type[Body],
    limit: int,
    convert: Callable[[Body], Converted],
    *,
    blocks: bool = False,
) -> tuple[Body, Converted]:
    """Read the body, decode it as `kind` and convert it. Raises the errors of `read_json` and of `convert`.

    A thread decodes and converts a large body, and every body if the conversion `blocks`.
    """

    def work(raw: bytes) -> tuple[Body, Converted]:
        body = decode(raw, kind)
        return body, convert(body)

    return await _off_loop(work, await _read(scope, receive, limit), always=blocks)


async def read_list(scope: Scope, receive: Receive, kind: type[Body], limit: int) -> list[Body]:
    """Read a body that is a JSON list of `kind`. Raises the errors of `read_json`."""

    def work(raw: bytes) -> list[Body]:
        return _decode(raw, list[kind], kind)  # type: ignore[valid-type]

    return await _off_loop(work, await _read(scope, receive, limit))


def decode(body: bytes, kind: type[Body]) -> Body:
    """Decode a JSON body without coercion. Raises InvalidRequest, which names the invalid field."""
    return _decode(body, kind, kind)


def _decode(body: bytes, target: type[Decoded], kind: type[WireBody]) -> Decoded:
    """Decode a JSON body as `target`, which is `kind` or `list[kind]`."""
    check_structure(body)
    try:
        return msgspec.json.decode(body, type=target)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def convert(value: object, target: type[Decoded], where: str, kind: type[WireBody]) -> Decoded:
    """Convert the JSON value at the path `where` of a body to `target`. Raises InvalidRequest with the invalid path.

    `kind`: has the reasons for fields that are refused.
    """
    try:
        return msgspec.convert(value, target)
    except msgspec.ValidationError as error:
        raise _explain(str(error).replace(" - at `$", f" - at `$.{where}"), kind) from None


def check_depth(value: object, param: str, limit: int = MAX_DEPTH) -> None:
    """Raises InvalidRequest if a JSON value has more than `limit` nested levels."""
    if limit < 0:
        raise InvalidRequest(f"{param} is nested more than {MAX_DEPTH} levels deep", param=param)
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            check_depth(item, param, limit - 1)


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields whose value is not None."""
    return {name: value for name, value in fields.items() if value is not None}


async def _off_loop(work: Callable[[bytes], Converted], raw: bytes, *, always: bool = False) -> Converted:
    """The result of `work`, which a thread computes for a large body, or `always`."""
    return await asyncio.to_thread(work, raw) if always or len(raw) > LARGE else work(raw)


async def _read(scope: Scope, receive: Receive, limit: int) -> bytes:
    headers = dict(scope["headers"])
    _check_media(headers)
    too_large = BodyTooLarge(f"the body exceeds the limit of {limit} bytes", hint="send less text in one request")
    length = int(headers.get(b"content-length", b"0"))
    if length > limit:
        if b"expect" not in headers:
            await _discard(receive, length)
        raise too_large
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        chunk, more = await _read_chunk(receive)
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            chunks.clear()
            if more:
                await _discard(receive, MAX_DISCARDED)
            raise too_large
    raw = b"".join(chunks)
    window = ENCODINGS[_encoding(headers)]
    return raw if window is None else await asyncio.to_thread(_decompressed, raw, window, limit)


def _encoding(headers: dict[bytes, bytes]) -> bytes:
    return headers.get(b"content-encoding", b"identity").strip().lower()


def _decompressed(raw: bytes, window: int, limit: int) -> bytes:
    """The body in a compressed one. Raises BodyTooLarge if it exceeds `limit` bytes, or InvalidRequest."""
    decompressor = zlib.decompressobj(window)
    try:
        body = decompressor.decompress(raw, limit + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not what Content-Encoding says: {error}") from None
    if len(body) > limit:
        raise BodyTooLarge(f"the body exceeds the limit of {limit} bytes", hint="send less text in one request")
    if not decompressor.eof or decompressor.unused_data:
        raise InvalidRequest("the compressed body is cut short, or other bytes follow it")
    return body


def _check_media(headers: dict[bytes, bytes]) -> None:
    """Raises UnsupportedMedia unless the headers announce JSON, compressed or not."""
    media = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if media != b"application/json":
        raise UnsupportedMedia("the body must be JSON, with Content-Type: application/json")
    if _encoding(headers) not in ENCODINGS:
        raise UnsupportedMedia(
            f"Content-Encoding {_encoding(headers)[:40].decode('latin-1')!r} is not supported",
            hint="use gzip or deflate, or send the body as it is",
        )


async def _read_chunk(receive: Receive) -> tuple[bytes, bool]:
    """The next bytes of the body, and True if more follow."""
    try:
        async with asyncio.timeout(READ_SECONDS):
            message = await receive()
    except TimeoutError:
        raise InvalidRequest(f"no data of the body arrived for {READ_SECONDS:.0f} s") from None
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message["body"], message["more_body"]


async def _discard(receive: Receive, size: int) -> None:
    """Read and drop the start of a body that is too large.

    A client that still sends would otherwise see a reset connection instead of the error.
    """
    remaining = min(size, MAX_DISCARDED)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            while remaining > 0:
                message = await receive()
                if message["type"] == "http.disconnect" or not message["more_body"]:
                    return
                remaining -= len(message["body"])


def _explain(text: str, kind: type[WireBody]) -> InvalidRequest:
    """Convert an error message of msgspec to an error with the JSON path of the invalid field."""
    where = _WHERE.search(text)
    path = where[1] if where else ""
    sentence = text[: where.start()] if where else text
    unknown = _UNKNOWN.match(sentence)
    if unknown:
        return _unknown_field(path, unknown[1][:100], kind)
    missing = _MISSING.match(sentence)
    if missing and not path:
        return InvalidRequest(f"{missing[1]} is missing", param=missing[1])
    top = re.split(r"[.\[]", path, maxsplit=1)[0]
    if top in kind.REFUSED:
        return UnsupportedParameter(f"{top}: {kind.REFUSED[top]}", param=top)
    if _PART_TYPE.search(path):
        return UnsupportedParameter(
            f"{path}: only text parts are supported ({sentence.lower()})",
            hint="the models read text only: leave images, audio and files out, or send their text",
            param=path,
        )
    if not path:
        return InvalidRequest(sentence)
    return InvalidRequest(f"{path}: {sentence[0].lower()}{sentence[1:]}", param=path)


def _unknown_field(path: str, name: str, kind: type[WireBody]) -> UnsupportedParameter:
    """The error for an unknown field of the object at `path` (empty: the body). Hint: a similar field of the body."""
    if path:
        return UnsupportedParameter(f"unknown parameter '{path}.{name}'", param=f"{path}.{name}")
    similar = difflib.get_close_matches(name, kind.__struct_fields__, n=1)
    hint = f"did you mean {similar[0]!r}?" if similar else ""
    return UnsupportedParameter(f"unknown parameter {name!r}", hint=hint, param=name)
