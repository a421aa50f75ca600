"""Each guard around the routes, without a socket and without routes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from starlette.types import ASGIApp

from localllm.app import errors
from localllm.app.api.body import ClientGone, is_local
from localllm.app.api.replies import error_response
from localllm.app.daemon import guards
from localllm.app.daemon.connection import MAX_HEAD
from localllm.app.errors import AppError, Forbidden, InvalidRequest, Unauthorized

ORIGIN = b"https://app.example"
PREFLIGHT = (b"access-control-request-method", b"POST")


def request(*headers: tuple[bytes, bytes], method: str = "GET", path: str = "/x", query: bytes = b"") -> dict[str, Any]:
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "headers": list(headers),
        "server": ("127.0.0.1", 1),
    }


class Inner:
    """The app behind a guard: it sends a response in two messages, or raises."""

    def __init__(self, error: BaseException | None = None, *, late: bool = False) -> None:
        self.error = error
        self.late = late
        self.scopes: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        if self.error is None or self.late:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        if self.error is not None:
            raise self.error
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def through(layer: ASGIApp, scope: dict[str, Any]) -> tuple[int | None, dict[str, str], bytes]:
    """The response behind a guard: status (None: nothing was sent), headers and body."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    await layer(scope, receive, send)
    if not sent:
        return None, {}, b""
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent)


RETRIED = {errors.Overloaded, errors.OutOfMemory, errors.Stopping}
KINDS = [kind for kind in errors.BY_CODE.values() if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", KINDS)
def test_error_headers_say_if_the_client_should_retry(kind: type[AppError]) -> None:
    headers = error_response(kind("x"), "/v1/models", {"x-more": "1"}).headers
    assert headers.get("retry-after") == ("1" if kind in RETRIED else None)
    final = kind.status >= 500 and kind not in RETRIED | {errors.WorkerDied}
    assert headers.get("x-should-retry") == ("false" if final else None)
    assert headers.get("www-authenticate") == ("Bearer" if kind is Unauthorized else None)
    assert headers.get("connection") == ("close" if kind is errors.BodyTooLarge else None)
    assert headers["x-more"] == "1"
    assert headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("values", "used"),
    [
        ([b"a.B_9-"], True),
        ([b"x" * 128], True),
        ([b"x" * 129], False),
        ([b""], False),
        ([b"a\n"], False),
        ([b"a/b"], False),
        ([b"a", b"a"], False),
        ([], False),
    ],
)
async def test_valid_request_id_of_the_client_is_used(values: list[bytes], used: bool) -> None:
    layer = guards.Traced(Inner())
    _, headers, _ = await through(layer, request(*((b"x-request-id", value) for value in values)))
    if used:
        assert headers["x-request-id"] == values[0].decode()
    else:
        assert re.fullmatch("req-[0-9a-f]{32}", headers["x-request-id"])


@pytest.mark.parametrize("error", [ClientGone(), InvalidRequest("bad"), RuntimeError("secret")])
@pytest.mark.parametrize("late", [False, True])
async def test_error_gets_one_response(error: Exception, late: bool) -> None:
    """No error response after a response has begun, or after the client disconnected."""
    status, _, body = await through(guards.Errors(Inner(error, late=late)), request())
    if late:
        assert (status, body) == (200, b"")
    elif isinstance(error, ClientGone):
        assert status is None
    else:
        assert status == (400 if isinstance(error, InvalidRequest) else 500)
        assert b"secret" not in body


async def test_head_at_the_limit_is_accepted() -> None:
    """The size of a head: path, query, and each header with its four separator bytes."""

    async def accepted(size: int) -> bool:
        scope = request((b"a", b"b"), (b"c", b"x" * size), path="/12345", query=b"1234567")
        try:
            await through(guards.Heads(Inner()), scope)
        except InvalidRequest:
            return False
        return True

    free = MAX_HEAD - 6 - 7 - (1 + 1 + 4) - (1 + 4)
    assert (await accepted(free), await accepted(free + 1)) == (True, False)


@pytest.mark.parametrize(
    ("path", "path_in_scope"), [("/a/", "/a"), ("//a///b//", "/a/b"), ("/", "/"), ("///", "/"), ("/a", "/a")]
)
async def test_extra_slashes_are_removed(path: str, path_in_scope: str) -> None:
    inner = Inner()
    await through(guards.Paths(inner), request(path=path))
    assert inner.scopes[0]["path"] == path_in_scope


@pytest.mark.parametrize("allowed", ["box.lan", "BOX.lan", "[fd00::1]"])
async def test_allowed_hosts_ignore_case_and_brackets(allowed: str) -> None:
    layer = guards.Hosts(Inner(), [allowed])
    host = b"[FD00::1]:80" if allowed.startswith("[") else b"Box.LAN:12345"
    assert (await through(layer, request((b"host", host))))[0] == 200
    for twice in ([(b"host", host)] * 2, [], [(b"host", host + b"0" if b"]" not in host else host[:-1] + b"000000")]):
        with pytest.raises(Forbidden):
            await through(layer, request(*twice))


async def test_allowed_address_has_any_spelling() -> None:
    layer = guards.Hosts(Inner(), ["fd00:0:0::1"])
    for host in (b"[fd00::1]", b"[FD00:0::1]:80"):
        assert (await through(layer, request((b"host", host))))[0] == 200


@pytest.mark.parametrize("allowed", ["https://app.example/", "HTTPS://App.example", "https://app.example:443"])
async def test_allowed_origins_ignore_case_and_trailing_slash(allowed: str) -> None:
    layer = guards.Origins(Inner(), [allowed])
    status, headers, _ = await through(layer, request((b"origin", ORIGIN)))
    assert (status, headers["access-control-allow-origin"], headers["vary"]) == (200, ORIGIN.decode(), "Origin")
    assert headers["access-control-expose-headers"] == "X-Request-Id, X-Localllm-Ignored, Retry-After"


@pytest.mark.parametrize("method", ["OPTIONS", "POST"])
@pytest.mark.parametrize("asks", [True, False])
async def test_origins_answers_only_a_preflight(method: str, asks: bool) -> None:
    inner = Inner()
    headers = [(b"origin", ORIGIN), *([PREFLIGHT] if asks else [])]
    status, sent, _ = await through(guards.Origins(inner, [ORIGIN.decode()]), request(*headers, method=method))
    answered = method == "OPTIONS" and asks
    assert (status, len(inner.scopes)) == ((204, 0) if answered else (200, 1))
    assert sent.get("access-control-allow-methods") == ("GET, POST, DELETE" if answered else None)
    assert sent.get("access-control-max-age") == ("600" if answered else None)


async def test_origin_is_not_checked_on_the_socket() -> None:
    layer = guards.Origins(Inner(), [])
    scope = request((b"origin", b"https://evil.example"))
    with pytest.raises(Forbidden):
        await through(layer, scope)
    status, headers, _ = await through(layer, scope | {"server": ("/socket", None)})
    assert (status, headers) == (200, {})
    assert not is_local(scope | {"server": None})


@pytest.mark.parametrize("value", [b"Bearer  key ", b"BEARER key"])
async def test_bearer_key_may_have_surrounding_spaces(value: bytes) -> None:
    layer = guards.Keys(Inner(), "key")
    assert (await through(layer, request((b"authorization", value))))[0] == 200
    with pytest.raises(Unauthorized, match="wrong"):
        await through(layer, request((b"authorization", b"Basic key")))
    with pytest.raises(Unauthorized, match="required"):
        await through(layer, request())
    assert (await through(layer, request(path="/health")))[0] == 200
