"""Bytes on the socket that are no good request: malformed, too large, incomplete, slow, or interrupted."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import pytest

from ...waiting import wait_until
from .conftest import Daemon

CHAT = "/v1/chat/completions"
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "minLength": 5, "maxLength": 2000},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
                "hint": {"type": "string"},
            },
            "additionalProperties": {"type": "integer"},
        }
    },
}


def post(body: bytes, path: str = CHAT, head: str = "Content-Type: application/json\r\n") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{head}Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def get(path: str, head: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{head}\r\n".encode()


def talk(daemon: Daemon, sent: bytes, seconds: float = 20.0) -> tuple[int, dict[str, Any]]:
    """Send bytes and read to the end; returns status and error body (empty: no error)."""
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=seconds) as connection:
        connection.sendall(sent)
        answer = b""
        while data := connection.recv(65536):
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body else {}


def chat_body(**more: Any) -> bytes:
    return json.dumps({"model": "test/echo", "messages": [{"role": "user", "content": "echo a"}]} | more).encode()


BAD_BYTES: dict[str, tuple[bytes, int, str]] = {
    "unfinished": (post(b"{"), 400, "invalid_request"),
    "empty": (post(b""), 400, "invalid_request"),
    "no utf-8": (post(b"\xff\xfe"), 400, "invalid_request"),
    "half a surrogate pair": (post(b'{"model":"test/echo\\ud800","messages":[]}'), 400, "invalid_request"),
    "NaN": (post(b'{"model":NaN}'), 400, "invalid_request"),
    "float overflow": (post(b'{"temperature":1e999,"messages":[]}'), 400, "invalid_request"),
    "5000 digits": (post(b'{"seed":' + b"9" * 5000 + b"}"), 400, "invalid_request"),
    "endless nesting": (post(b'{"guided_json":' + b'{"a":' * 200_000), 400, "invalid_request"),
    "integer beyond 64 bits": (post(chat_body(guided_json={"a": 10**40})), 400, "invalid_request"),
    "relative path": (post(chat_body(model="../../etc/passwd")), 404, "model_not_found"),
    "absolute path": (post(chat_body(model="/etc")), 404, "model_not_found"),
    "home path": (post(chat_body(model="~/x")), 404, "model_not_found"),
    "NUL in a name": (post(chat_body(model="a\0b")), 404, "model_not_found"),
    "no type": (post(chat_body(), head=""), 415, "unsupported_media_type"),
    "text": (post(chat_body(), head="Content-Type: text/plain\r\n"), 415, "unsupported_media_type"),
    "zstd": (
        post(chat_body(), head="Content-Type: application/json\r\nContent-Encoding: zstd\r\n"),
        415,
        "unsupported_media_type",
    ),
    "no gzip": (
        post(chat_body(), head="Content-Type: application/json\r\nContent-Encoding: gzip\r\n"),
        400,
        "invalid_request",
    ),
    "too large": (post(b"x" * (2**20 + 1)), 413, "request_too_large"),
    "says it is too large": (
        post(b"").replace(b"Length: 0", b"Length: 99999999999999999999"),
        413,
        "request_too_large",
    ),
    "no HTTP": (b"nonsense\r\n\r\n", 400, "invalid_request"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400, "invalid_request"),
    "huge header": (get("/health", f"X: {'a' * 40_000}\r\n"), 400, "invalid_request"),
    "many headers": (get("/health", "X: a\r\n" * 9000), 400, "invalid_request"),
    "NUL in a header": (get("/health", "A: \0\r\n"), 400, "invalid_request"),
    "two lengths": (
        post(chat_body(), head="Content-Type: application/json\r\nContent-Length: 3\r\n"),
        400,
        "invalid_request",
    ),
    "no route": (get("/v1/nowhere"), 404, "route_not_found"),
    "odd route": (get("/%00%ff/../.."), 404, "route_not_found"),
    "wrong method": (get(CHAT), 405, "method_not_allowed"),
    "other method": (get("/health").replace(b"GET", b"DELETE"), 405, "method_not_allowed"),
}


@pytest.mark.parametrize("name", BAD_BYTES)
def test_bad_bytes_get_a_typed_error(daemon: Daemon, name: str) -> None:
    sent, status, code = BAD_BYTES[name]
    got, body = talk(daemon, sent)
    assert (got, body["error"]["code"]) == (status, code)
    jsonschema.validate(body, ERROR_SCHEMA)


def test_wrong_method_error_names_the_right_one(daemon: Daemon) -> None:
    assert httpx.get(daemon.url + CHAT).headers["allow"] == "POST"


def test_nul_and_repeated_names_in_json(daemon: Daemon) -> None:
    status, body = talk(daemon, post(chat_body(messages=[{"role": "user", "content": "echo a\0b"}])))
    assert (status, body["choices"][0]["message"]["content"]) == (200, "a\0b ")
    again = chat_body()[:-1] + b', "max_tokens": 2, "max_tokens": 1}'  # the last of two equal names counts
    assert talk(daemon, post(again))[0] == 200


@pytest.mark.parametrize("chunks", [0, 7])
def test_body_at_the_limit_is_accepted(daemon: Daemon, chunks: int) -> None:
    body = chat_body().ljust(2**20)
    sent = post(body)
    if chunks:
        size = len(body) // chunks
        parts = [body[start : start + size] for start in range(0, len(body), size)]
        sent = post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        sent += b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts, b""])
    status, answer = talk(daemon, sent)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "a ")


def test_chunked_body_over_the_limit_is_refused_early(daemon: Daemon) -> None:
    head = post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=100) as connection:
        connection.sendall(head)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 2**26:
                connection.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
                sent += 0x10000
        assert sent < 2**25  # the daemon does not read all of it


def test_incomplete_request_does_not_delay_others(daemon: Daemon) -> None:
    half = [socket.create_connection(("127.0.0.1", daemon.port)) for _ in range(20)]
    for number, connection in enumerate(half):
        connection.sendall(post(chat_body())[: 20 + 10 * number])
    assert daemon.chat("echo a").status_code == 200
    for connection in half:
        connection.close()
    assert daemon.chat("echo a").status_code == 200


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /"])
def test_incomplete_head_is_dropped(start_daemon: Callable[..., Daemon], sent: bytes) -> None:
    daemon = start_daemon(env={"TEST_HEAD_SECONDS": "0.3"})
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=100) as connection:
        connection.sendall(sent)
        while connection.recv(65536):
            pass
    assert daemon.chat("echo a").status_code == 200


def test_idle_connection_has_no_head_timeout(start_daemon: Callable[..., Daemon]) -> None:
    """No time limit applies to an answer, or to the pause before the next request of a connection."""
    daemon = start_daemon(env={"TEST_HEAD_SECONDS": "0.3"})
    daemon.chat("echo a")
    request = post(chat_body(messages=[{"role": "user", "content": "slow 25"}])).replace(b"Connection: close\r\n", b"")
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=100) as connection:
        for _ in range(2):
            connection.sendall(request)
            answer = b""
            while b'"usage"' not in answer:
                data = connection.recv(65536)
                assert data, answer
                answer += data
            time.sleep(0.5)
        connection.sendall(b"GET /")
        assert connection.recv(65536) == b"", "the time limit applies to the next head after its first byte"


def test_two_requests_in_one_packet(daemon: Daemon) -> None:
    one = post(chat_body()).replace(b"Connection: close\r\n", b"")
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=100) as connection:
        connection.sendall(one + post(chat_body()))
        answer = b""
        while data := connection.recv(65536):
            answer += data
    assert answer.count(b"HTTP/1.1 200 OK") == 2


def running(daemon: Daemon) -> int:
    """The number of running answers in the statistics of the worker."""
    return int(daemon.loaded()["test/echo"]["cache_used"])


@pytest.mark.parametrize("how", ["close", "reset", "shutdown"])
@pytest.mark.parametrize("stream", [False, True])
def test_worker_stops_when_the_client_disconnects(daemon: Daemon, stream: bool, how: str) -> None:
    daemon.chat("echo a")
    body = chat_body(messages=[{"role": "user", "content": "slow 100000"}], stream=stream)
    connection = socket.create_connection(("127.0.0.1", daemon.port))
    connection.sendall(post(body))
    if stream:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    wait_until(lambda: running(daemon) == 1)
    if how == "shutdown":
        connection.shutdown(socket.SHUT_WR)
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    if how != "shutdown":
        connection.close()
    wait_until(lambda: running(daemon) == 0)
    connection.close()


def test_client_disconnects_at_any_byte(daemon: Daemon) -> None:
    daemon.chat("echo a")
    whole = post(chat_body(messages=[{"role": "user", "content": "slow 50"}], stream=True))
    choose = random.Random(7)
    for _ in range(60):
        with socket.create_connection(("127.0.0.1", daemon.port)) as connection:
            connection.sendall(whole[: choose.randrange(1, len(whole) + 1)])
            if choose.random() < 0.3:
                connection.settimeout(0.02)
                with contextlib.suppress(TimeoutError):
                    connection.recv(choose.randrange(1, 2000))
    wait_until(lambda: running(daemon) == 0)
    assert daemon.chat("echo a").status_code == 200


def test_slow_reader_is_cancelled_and_others_continue(daemon: Daemon) -> None:
    daemon.chat("echo a")
    body = chat_body(messages=[{"role": "user", "content": "loud 20000"}], stream=True, logprobs=True, top_logprobs=20)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**15)
        connection.connect(("127.0.0.1", daemon.port))
        connection.sendall(post(body))
        wait_until(lambda: running(daemon) == 0)  # cancelled, or finished
        assert daemon.chat("echo a").status_code == 200
        connection.settimeout(100)
        answer = b""
        while data := connection.recv(2**20):
            answer += data
    assert b"reads too slowly" in answer[-1000:]


def mutations(choose: random.Random) -> Any:
    """A random value for any place in a body."""
    return choose.choice(
        [
            None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**40, 0.5, -0.0, 1e308, 1e-320, "", "a",
            "\0", "\u2028", "\U0001f600" * 50, "x" * 5000, "1", [], [[]], [None], [1, "a"], {}, {"a": {}}, {"": 0},
            {"type": "text"}, {"type": "json_schema"}, {"role": "user"}, [{}], [{"type": "text", "text": "a"}],
            ["a"] * 200, {"1": 1}, {"-1": 1}, {"999999999": 5}, "auto", "none", "required",
        ]
    )  # fmt: skip


FULL_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "test/echo", "messages": [{"role": "user", "content": "echo a"}], "temperature": 1, "top_p": 1, "n": 1,
        "stop": ["x"], "seed": 1, "logit_bias": {"1": 1}, "logprobs": True, "top_logprobs": 1, "max_tokens": 5,
        "response_format": {"type": "text"}, "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "auto", "stream": False, "chat_template_kwargs": {"thinking": True}, "metadata": {"a": "b"},
        "presence_penalty": 0, "repetition_penalty": 1, "top_k": 1, "min_p": 0, "stop_token_ids": [1],
    },
    "/v1/completions": {
        "model": "test/echo", "prompt": ["echo a"], "max_tokens": 5, "echo": False, "logprobs": 1, "n": 1, "best_of": 1,
    },
    "/v1/tokenize": {"model": "test/echo", "prompt": "a b"},
    "/v1/detokenize": {"model": "test/echo", "tokens": [1, 2]},
}  # fmt: skip


def mutate(choose: random.Random, value: Any) -> Any:
    """A copy with one value changed, removed or added."""
    if isinstance(value, dict) and value and choose.random() < 0.8:
        key = choose.choice(list(value))
        act = choose.random()
        if act < 0.1:
            return {name: item for name, item in value.items() if name != key}
        if act < 0.2:
            return value | {choose.choice(["x", "", "stream", "\0", "tool_calls", "audio"]): mutations(choose)}
        return value | {key: mutate(choose, value[key])}
    if isinstance(value, list) and value and choose.random() < 0.7:
        index = choose.randrange(len(value))
        return [mutate(choose, item) if place == index else item for place, item in enumerate(value)]
    return mutations(choose)


def test_random_bodies_get_a_valid_response(daemon: Daemon) -> None:
    choose = random.Random(20261121)
    daemon.chat("echo a")
    accepted = 0
    with httpx.Client(base_url=daemon.url, timeout=100, trust_env=False) as client:
        for case in range(600):
            path = choose.choice(list(FULL_BODIES))
            body: Any = FULL_BODIES[path]
            for _ in range(choose.randrange(1, 4)):
                body = mutate(choose, body)
            content = json.dumps(body).encode()
            if choose.random() < 0.15:
                place = choose.randrange(len(content))
                content = content[:place] + bytes([choose.randrange(256)]) + content[place + 1 :]
            response = client.post(path, content=content, headers={"content-type": "application/json"})
            assert response.status_code < 500, (case, path, content, response.text)
            if response.status_code == 200:
                accepted += 1
            else:
                assert response.status_code in {400, 404}, (case, path, content, response.text)
                jsonschema.validate(response.json(), ERROR_SCHEMA)
    assert 20 < accepted < 400  # otherwise too few or too many bodies are valid
    assert daemon.chat("echo a").status_code == 200
