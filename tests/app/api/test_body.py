"""Reading and decoding of bodies, without a socket: limits, pauses and errors."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import pytest

from localllm.app.api import body as bodies
from localllm.app.api.body import ClientGone, WireBody, check_depth, decode, read_json
from localllm.app.errors import AppError, BodyTooLarge, InvalidRequest, UnsupportedMedia, UnsupportedParameter

LIMIT = 100
JSON = (b"content-type", b"application/json")


class Small(WireBody):
    REFUSED: ClassVar[dict[str, str]] = {"old": "it went"}

    text: str = ""
    old: None = None
    inner: dict[str, Inner] = {}


class Strict(WireBody):
    name: str
    inner: list[Strict] = []


class Inner(WireBody):
    number: int = 0


class Client:
    """Sends chunks of a body, then does the action `then`; counts the chunks that were read."""

    def __init__(self, *parts: bytes, then: Literal["end", "gone", "silence", "again"] = "end") -> None:
        self.parts = parts
        self.then = then
        self.read = 0

    async def receive(self) -> Any:
        if self.read >= len(self.parts) and self.then != "again":
            assert self.then != "end", "nothing follows"
            if self.then == "gone":
                return {"type": "http.disconnect"}
            await asyncio.sleep(60)
        part = self.parts[self.read % len(self.parts)]
        self.read += 1
        return {"type": "http.request", "body": part, "more_body": self.then != "end" or self.read < len(self.parts)}


async def read(client: Client, *headers: tuple[bytes, bytes]) -> Small:
    return await read_json({"headers": [JSON, *headers]}, client.receive, Small, LIMIT)


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_chunks_are_joined(size: int) -> None:
    whole = b'{"text": "abcdefghij"}'
    client = Client(*(whole[start : start + size] for start in range(0, len(whole), size)))
    assert (await read(client)).text == "abcdefghij"


@pytest.mark.parametrize(
    ("header", "value", "good"),
    [
        (b"content-type", b"Application/JSON ; charset=utf-8", True),
        (b"content-type", b"application/jsonx", False),
        (b"content-type", b"", False),
        (b"content-encoding", b"Identity", True),
        (b"content-encoding", b"br", False),
    ],
)
async def test_other_media_are_refused(header: bytes, value: bytes, good: bool) -> None:
    if good:
        assert (await read(Client(b"{}"), (header, value))) == Small()
    else:
        with pytest.raises(UnsupportedMedia):
            await read(Client(b"{}"), (header, value))


async def test_large_body_is_discarded_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client can then read the response. A client with the header Expect gets the response at once."""
    monkeypatch.setattr(bodies, "MAX_DISCARDED", 300)
    length = (b"content-length", b"%d" % (LIMIT + 1))

    async def parts_read(client: Client, *headers: tuple[bytes, bytes]) -> int:
        with pytest.raises(BodyTooLarge):
            await read(client, *headers)
        return client.read

    part = b"x" * 50
    assert await parts_read(Client(part, then="again"), length) == 3, "all announced bytes"
    assert await parts_read(Client(part, then="again"), (b"content-length", b"1000")) == 6
    assert await parts_read(Client(part, then="again"), length, (b"expect", b"100-continue")) == 0
    assert await parts_read(Client(part, then="again")) == 3 + 6
    assert await parts_read(Client(part, part), length) == 2
    assert await parts_read(Client(part, part, part)) == 3, "the body is complete"
    assert await parts_read(Client(part, part, part, part)) == 4
    assert await parts_read(Client(part, part, part, then="gone")) == 3
    monkeypatch.setattr(bodies, "DISCARD_SECONDS", 0.01)
    assert await parts_read(Client(part, then="silence"), length) == 1


async def test_client_that_disconnects_or_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClientGone):
        await read(Client(b"{", then="gone"))
    monkeypatch.setattr(bodies, "READ_SECONDS", 0.01)

    with pytest.raises(InvalidRequest, match="no data of the body arrived"):
        await read(Client(b"{", then="silence"))


def test_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode(b"{}", Strict)
    assert (refused.value.param, refused.value.message) == ("name", "name is missing")
    with pytest.raises(InvalidRequest, match=r"^inner\[0\]: object missing required field `name`$"):
        decode(b'{"name": "a", "inner": [{}]}', Strict)


def nested(levels: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrap", [lambda value: [value], lambda value: {"a": 1, "b": value}])
def test_depth_limit(wrap: Callable[[Any], Any]) -> None:
    check_depth(nested(bodies.MAX_DEPTH, wrap), "p")
    with pytest.raises(InvalidRequest, match="64 levels") as refused:
        check_depth(nested(bodies.MAX_DEPTH + 1, wrap), "p")
    assert refused.value.param == "p"


@pytest.mark.parametrize(
    ("text", "kind", "param", "hint", "words"),
    [
        (b'{"txt": 1}', UnsupportedParameter, "txt", "did you mean 'text'?", "unknown parameter 'txt'"),
        (b'{"zzz": 1}', UnsupportedParameter, "zzz", "", "unknown parameter 'zzz'"),
        (b'{"%s": 1}' % (b"x" * 200), UnsupportedParameter, "x" * 100, "", "unknown parameter"),
        (b'{"inner": {"a": {"txt": 1}}}', UnsupportedParameter, "inner[...].txt", "", "unknown parameter"),
        (b'{"old": 1}', UnsupportedParameter, "old", "", "old: it went"),
        (b'{"text": 1}', InvalidRequest, "text", "", "text: expected `str`, got `int`"),
        (b"[]", InvalidRequest, None, "", "Expected `object`, got `array`"),
        (b"{", InvalidRequest, None, "", "the body is not valid JSON"),
    ],
)
def test_error_names_the_field(text: bytes, kind: type[AppError], param: str | None, hint: str, words: str) -> None:
    with pytest.raises(kind) as refused:
        decode(text, Small)
    assert type(refused.value) is kind
    assert (refused.value.param, refused.value.hint) == (param, hint)
    assert refused.value.message.startswith(words)


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [(b"gzip", gzip.compress), (b"X-GZip", gzip.compress), (b"deflate", zlib.compress), (b"identity", bytes)],
)
async def test_compressed_bodies(encoding: bytes, compress: Callable[[bytes], bytes]) -> None:
    client = Client(compress(b'{"text": "abc"}'))
    assert (await read(client, (b"content-encoding", encoding))).text == "abc"


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (gzip.compress(b"[" * LIMIT * 100), BodyTooLarge),
        (gzip.compress(b"{}")[:-3], InvalidRequest),
        (gzip.compress(b"{}") + b"x", InvalidRequest),
        (b"{}", InvalidRequest),
        (b"", InvalidRequest),
    ],
)
async def test_wrong_compressed_bodies_are_refused(raw: bytes, error: type[AppError]) -> None:
    with pytest.raises(error):
        await read(Client(raw), (b"content-encoding", b"gzip"))
