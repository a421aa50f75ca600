"""The transport of downloads: kept connections, large bodies, incomplete bodies, proxies, encryption."""

from __future__ import annotations

import base64
import random
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpcore
import pytest

from localllm.app.store.transfer import http
from localllm.app.store.transfer.failures import Interrupted, Refused, Transient
from localllm.app.store.transfer.http import Connection, Credentials
from localllm.app.store.transfer.policy import Policy
from localllm.app.store.transfer.transport import BLOCK_BYTES

BODY = random.Random(0).randbytes(3 * BLOCK_BYTES + 1234)
POLICY = Policy(stall_timeout=2.0, connect_timeout=2.0)
CERTIFICATE = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"


def send_all(connection: socket.socket, body: bytes) -> None:
    connection.sendall(body)


class Server:
    """Serves BODY to requests for ranges, directly or as a proxy, and logs the requests."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.context = context  # of connections that begin encrypted, or of a tunnel
        self.encrypted = False  # connections begin encrypted
        self.connections = 0
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.fields = ""  # more header lines
        self.chunked = False
        self.refuses_tunnels = False
        self.finish = send_all  # sends the body
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            if self.encrypted:
                connection = self._encrypt(connection)
            while self._answer(connection):
                pass
        except OSError:
            pass
        finally:
            connection.close()

    def _encrypt(self, connection: socket.socket) -> socket.socket:
        assert self.context is not None
        return self.context.wrap_socket(connection, server_side=True)

    def _answer(self, connection: socket.socket) -> bool:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            byte = connection.recv(1)
            if not byte:
                return False
            head += byte
        line, *fields = head.decode().strip().split("\r\n")
        method, target, _ = line.split(" ")
        headers = {name.lower(): value for name, _, value in (field.partition(": ") for field in fields)}
        self.requests.append((f"{method} {target}", headers))
        if method == "CONNECT" and self.refuses_tunnels:
            connection.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            return False
        if method == "CONNECT":
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            self._serve(self._encrypt(connection))
            return False
        first, _, last = headers["range"].removeprefix("bytes=").partition("-")
        body = BODY[int(first) : int(last) + 1]
        length = "Transfer-Encoding: chunked" if self.chunked else f"Content-Length: {len(body)}"
        lines = ["HTTP/1.1 206 OK", f"Content-Range: bytes {first}-{last}/{len(BODY)}", length, self.fields]
        connection.sendall("\r\n".join([*filter(None, lines), "", ""]).encode())
        if self.chunked:
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        self.finish(connection, body)
        return True


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def connection() -> Iterator[Connection]:
    connection = Connection(POLICY, Credentials())
    yield connection
    connection.close()


@pytest.fixture
def contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """The context of a server whose certificate this process accepts."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl creates the certificate")
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    subprocess.run(
        ["openssl", *CERTIFICATE.split(), "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    monkeypatch.setattr(http, "_certificates", lambda: ssl.create_default_context(cafile=str(certificate)))
    return context


def fetch(connection: Connection, url: str, start: int = 1, end: int = len(BODY)) -> bytes:
    """The bytes of a range, as a worker receives them."""
    reply = connection.open_range(url, start, end, len(BODY))
    try:
        return b"".join(bytes(block) for block in reply.blocks())
    finally:
        reply.close()


def receive_until_error(connection: Connection, url: str) -> tuple[bytes, Transient]:
    """The bytes of an incomplete reply, and the error that ends it."""
    reply = connection.open_range(url, 1, len(BODY), len(BODY))
    received = bytearray()
    try:
        for block in reply.blocks():
            received += block
    except Transient as error:
        return bytes(received), error
    finally:
        reply.close()
    raise AssertionError("the reply is complete")


def test_requests_share_one_connection(server: Server, connection: Connection) -> None:
    url = f"http://{server.address}/file"
    for start in (1, 2, len(BODY) - 1):
        assert fetch(connection, url, start) == BODY[start:]
    server.chunked = True
    assert fetch(connection, url) == BODY[1:]
    server.chunked = False
    assert fetch(connection, url) == BODY[1:]
    assert server.connections == 1


def test_connection_that_the_server_closes_is_opened_again(server: Server, connection: Connection) -> None:
    server.fields = "Connection: close"
    for _ in range(2):
        assert fetch(connection, f"http://{server.address}/file") == BODY[1:]
    assert server.connections == 2


def test_reply_that_is_not_read_to_its_end_does_not_disturb_the_next(server: Server, connection: Connection) -> None:
    url = f"http://{server.address}/file"
    reply = connection.open_range(url, 1, len(BODY), len(BODY))
    next(reply.blocks())
    reply.close()
    assert fetch(connection, url, 5) == BODY[5:]
    server.finish = lambda connection, body: connection.sendall(body + b"more than the head says")
    assert fetch(connection, url, 6) == BODY[6:]
    assert fetch(connection, url, 7) == BODY[7:]


def test_close_ends_a_reply_that_is_still_open(server: Server) -> None:
    connection = Connection(POLICY, Credentials())
    reply = connection.open_range(f"http://{server.address}/file", 1, len(BODY), len(BODY))
    blocks = reply.blocks()
    next(blocks)
    connection.close()
    with pytest.raises(Transient):
        list(blocks)


def test_bytes_before_the_end_of_a_connection_arrive(server: Server, connection: Connection) -> None:
    half = len(BODY) // 2

    def send_half(connection: socket.socket, body: bytes) -> None:
        connection.sendall(body[:half])
        connection.shutdown(socket.SHUT_RDWR)

    server.finish = send_half
    received, _ = receive_until_error(connection, f"http://{server.address}/file")
    assert received == BODY[1 : 1 + half]


def test_stalled_body_ends_with_the_bytes_that_arrived(server: Server) -> None:
    connection = Connection(Policy(stall_timeout=0.1), Credentials())
    server.finish = lambda connection, body: connection.sendall(body[:-10])
    received, error = receive_until_error(connection, f"http://{server.address}/file")
    assert "sent no data for too long" in str(error)
    connection.close()
    assert received == BODY[1:-10]


def test_interrupt_ends_a_body_and_all_requests_until_restart(server: Server, connection: Connection) -> None:
    url = f"http://{server.address}/file"
    half = len(BODY) // 2
    server.finish = lambda connection, body: connection.sendall(body[:half])
    reply = connection.open_range(url, 1, len(BODY), len(BODY))
    blocks = reply.blocks()
    next(blocks)
    threading.Timer(0.1, connection.interrupt).start()
    with pytest.raises(Transient):
        list(blocks)
    reply.close()
    with pytest.raises(Interrupted):
        fetch(connection, url)
    connection.restart()
    server.finish = send_all
    assert fetch(connection, url) == BODY[1:]


def test_interrupt_during_the_connection_ends_the_request(
    server: Server, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = httpcore.SyncBackend.connect_tcp

    def connect_then_interrupt(self: httpcore.SyncBackend, host: str, port: int, timeout: float) -> object:
        stream = connect(self, host, port, timeout)
        connection.interrupt()
        return stream

    monkeypatch.setattr(httpcore.SyncBackend, "connect_tcp", connect_then_interrupt)
    with pytest.raises(Interrupted):
        fetch(connection, f"http://{server.address}/file")


def test_encrypted_connection_is_kept(contexts: ssl.SSLContext) -> None:
    server = Server(contexts)
    server.encrypted = True
    connection = Connection(POLICY, Credentials())
    for _ in range(2):
        assert fetch(connection, f"https://{server.address}/file") == BODY[1:]
    connection.close()
    server.close()
    assert server.connections == 1


def test_certificate_of_another_authority_is_refused(contexts: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    server = Server(contexts)
    server.encrypted = True
    connection = Connection(POLICY, Credentials())
    with pytest.raises(Refused, match="certificate"):
        fetch(connection, f"https://{server.address}/file")
    connection.close()
    server.close()


def test_proxy_forwards_plain_requests(server: Server, connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://us%40er:pass@{server.address}")
    monkeypatch.setenv("no_proxy", "")
    for _ in range(2):
        assert fetch(connection, "http://hub.example/file") == BODY[1:]
    request, headers = server.requests[0]
    assert request == "GET http://hub.example/file"
    assert headers["host"] == "hub.example"
    assert base64.b64decode(headers["proxy-authorization"].removeprefix("Basic ")) == b"us@er:pass"
    assert server.connections == 1


def test_no_proxy_goes_to_the_server(server: Server, connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert fetch(connection, f"http://{server.address}/file") == BODY[1:]


def test_proxy_passes_encrypted_requests_through_a_tunnel(
    contexts: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Server(contexts)
    monkeypatch.setenv("https_proxy", f"http://user:pass@{proxy.address}")
    monkeypatch.setenv("no_proxy", "")
    connection = Connection(POLICY, Credentials({"https://127.0.0.1:443": {"Authorization": "Bearer secret"}}))
    for _ in range(2):
        assert fetch(connection, "https://127.0.0.1/file") == BODY[1:]
    connection.close()
    proxy.close()
    (opening, opening_headers), (request, headers), _ = proxy.requests
    assert opening == "CONNECT 127.0.0.1:443"
    assert "authorization" not in opening_headers
    assert "proxy-authorization" in opening_headers
    assert request == "GET /file"
    assert headers["authorization"] == "Bearer secret"
    assert "proxy-authorization" not in headers


def test_encrypted_proxy_forwards_plain_requests(contexts: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Server(contexts)
    proxy.encrypted = True
    monkeypatch.setenv("http_proxy", f"https://{proxy.address}")
    monkeypatch.setenv("no_proxy", "")
    connection = Connection(POLICY, Credentials())
    assert fetch(connection, "http://hub.example/file") == BODY[1:]
    connection.close()
    proxy.close()


def test_proxy_of_another_kind_is_refused(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(Refused, match="socks5"):
        connection.open("http://hub.example/file")


def test_proxy_that_refuses_a_tunnel_is_named(
    server: Server, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.refuses_tunnels = True
    monkeypatch.setenv("https_proxy", f"http://{server.address}")
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(Transient, match=r"cannot reach hub\.example: the proxy 127\.0\.0\.1 returned status 407"):
        connection.open("https://hub.example/file")
