"""The checks of Host, Origin, key and socket."""

from __future__ import annotations

import os
import signal
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from localllm.app.api.routes import Address
from localllm.app.config import Settings
from localllm.app.daemon import connection as connections
from localllm.app.daemon.models import LoadedModels
from localllm.app.daemon.server import build
from localllm.app.store import listing

KEY = "k" * 40
ORIGIN = "https://app.example"


def app(**address: Any) -> Any:
    settings = Settings(allowed_hosts=("box.lan",), allowed_origins=(ORIGIN,))
    return build(LoadedModels(settings), Address(**address))


async def ask(
    path: str = "/health",
    method: str = "GET",
    *,
    headers: list[tuple[str, Any]] | None = None,
    server: tuple[str, int | None] = ("127.0.0.1", 11811),
    key: str = "",
    **more: Any,
) -> httpx.Response:
    """Send a request to the app with these headers and this server address."""
    inner = app(key=key)

    async def on_socket(scope: Any, receive: Any, send: Any) -> None:
        await inner(scope | {"server": server}, receive, send)

    transport = httpx.ASGITransport(on_socket, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        request = client.build_request(method, path, **more)
        sent = headers or []
        others = [(name, value) for name, value in sent if name != "Host"]
        request.headers = httpx.Headers([("Host", "localhost"), *request.headers.multi_items()[1:], *others])
        request.headers["Host"] = dict(sent).get("Host", "localhost")
        return await client.send(request)


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "LOCALHOST:11811", "127.0.0.1", "127.0.0.1:1", "127.9.9.9", "[::1]", "[::1]:80", "box.lan:80",
        "192.168.7.7:11811",
    ],
)  # fmt: skip
async def test_accepted_hosts(host: str) -> None:
    assert (await ask(headers=[("Host", host)], server=("192.168.7.7", 11811))).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:11811", "192.168.7.8", "",
        "localhost:x", "localhost:11811:1", "127.0.0.1@evil.example", "[evil]", "::1", "0.0.0.0", "8.8.8.8",
        "2130706433", "box.lan.", "a b", "localhost/", "lоcalhost".encode().decode("latin-1"),
    ],
)  # fmt: skip
async def test_refused_hosts(host: str) -> None:
    response = await ask(headers=[("Host", host)], server=("192.168.7.7", 11811))
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "forbidden"
    assert (await ask(headers=[("Host", host)], server=("/run/daemon.sock", None))).status_code == 200


async def test_ipv4_client_of_an_ipv6_socket_is_accepted() -> None:
    """A socket for IPv6 and IPv4 has the local address ::ffff:192.168.7.7; the client sends Host 192.168.7.7."""
    for server in ("::ffff:192.168.7.7", "::ffff:192.168.7.7%eth0"):
        assert (await ask(headers=[("Host", "192.168.7.7:11811")], server=(server, 11811))).status_code == 200
        assert (await ask(headers=[("Host", "192.168.7.8")], server=(server, 11811))).status_code == 403
    assert (await ask(headers=[("Host", "[fd00::7]")], server=("fd00::7", 11811))).status_code == 200


@pytest.mark.parametrize("part", ["path", "query", "name", "value", "many"])
async def test_head_limit_counts_path_query_and_headers(part: str) -> None:
    async def status(size: int) -> int:
        text = "x" * size
        headers = {"name": [(text, "1")], "value": [("X-Long", text)], "many": [("X", "y")] * (size // 6)}
        path = {"path": f"/{text}", "query": f"/health?{text}"}.get(part, "/health")
        return (await ask(path, headers=headers.get(part))).status_code

    assert await status(connections.MAX_HEAD - 500) == (404 if part == "path" else 200)
    assert await status(connections.MAX_HEAD) == 400


@pytest.mark.parametrize(
    ("origins", "status"),
    [
        ([], 200),
        ([ORIGIN], 200),
        ([ORIGIN.upper()], 200),
        (["null"], 403),
        ([""], 403),
        (["http://localhost:11811"], 403),
        (["https://app.example.evil"], 403),
        (["https://app.example:8443"], 403),
        (["http://app.example"], 403),
        ([ORIGIN, ORIGIN], 403),
        (["file://"], 403),
    ],
)
async def test_origins(origins: list[str], status: int) -> None:
    response = await ask(headers=[("Origin", origin) for origin in origins])
    assert response.status_code == status
    allowed = response.headers.get("access-control-allow-origin")
    assert allowed == (origins[0].replace("HTTPS://APP.EXAMPLE", ORIGIN.upper()) if origins and status == 200 else None)


async def test_preflight() -> None:
    asking = [("Origin", ORIGIN), ("Access-Control-Request-Method", "POST")]
    response = await ask("/v1/chat/completions", "OPTIONS", headers=asking, key=KEY)
    assert response.status_code == 204
    assert "authorization" in response.headers["access-control-allow-headers"].lower()
    assert "x-stainless-retry-count" in response.headers["access-control-allow-headers"].lower()
    assert "*" not in response.headers["access-control-allow-origin"]
    foreign = await ask("/v1/chat/completions", "OPTIONS", headers=[("Origin", "https://evil.example"), asking[1]])
    assert foreign.status_code == 403
    assert "access-control-allow-origin" not in foreign.headers


async def test_allowed_origin_can_read_errors() -> None:
    response = await ask("/v1/models", headers=[("Origin", ORIGIN)], key=KEY)
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == ORIGIN


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 401),
        ([("Authorization", f"Bearer {KEY}")], 200),
        ([("Authorization", f"bearer {KEY}")], 200),
        ([("X-Api-Key", KEY)], 200),
        ([("X-Api-Key", KEY), ("Authorization", f"Bearer {KEY}")], 200),
        ([("X-Api-Key", KEY), ("Authorization", "Bearer wrong")], 401),
        ([("X-Api-Key", "wrong"), ("Authorization", f"Bearer {KEY}")], 401),
        ([("Authorization", KEY)], 401),
        ([("Authorization", f"Basic {KEY}")], 401),
        ([("Authorization", "Bearer ")], 401),
        ([("X-Api-Key", "")], 401),
        ([("X-Api-Key", KEY[:-1])], 401),
        ([("X-Api-Key", KEY + "k")], 401),
        ([("X-Api-Key", b"\xf6")], 401),
    ],
)
async def test_keys(headers: list[tuple[str, Any]], status: int) -> None:
    response = await ask("/metrics", headers=headers, key=KEY)
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert KEY not in response.text


async def test_every_route_but_health_requires_the_key() -> None:
    routes = [route for route in app(key=KEY).routes if isinstance(route, Route)]
    assert len(routes) > 15
    for route in routes:
        for method in route.methods or ():
            path = route.path.replace("{id:path}", "guide")
            status = (await ask(path, method, key=KEY)).status_code
            assert status == (200 if path == "/health" else 401), (method, path)
    assert (await ask("/nowhere", key=KEY)).status_code == 401
    assert (await ask("/health/../metrics", key=KEY)).status_code == 401
    assert (await ask("http://localhost//health//", key=KEY)).status_code == 200


async def test_admin_needs_the_socket_or_the_key() -> None:
    routes = [route for route in app().routes if isinstance(route, Route) and route.path.startswith("/admin")]
    assert len(routes) > 20
    for route in routes:
        for method in route.methods or ():
            response = await ask(route.path, method, json={"model": "x"})
            assert response.status_code == 403, route.path
    assert (await ask("/admin/status")).status_code == 403
    assert (await ask("/admin/status", key=KEY, headers=[("X-Api-Key", KEY)])).status_code == 200
    assert (await ask("/admin/status", key=KEY, server=("/run/daemon.sock", None))).status_code == 200


async def test_every_route_refuses_other_hosts_and_origins() -> None:
    """Also with the right key: a page of another site must not use the key of a browser's user."""
    for route in (route for route in app().routes if isinstance(route, Route)):
        path = route.path.replace("{id:path}", "guide")
        for header in (("Host", "evil.example"), ("Origin", "https://evil.example")):
            for method in route.methods or ():
                response = await ask(path, method, key=KEY, headers=[("X-Api-Key", KEY), header])
                assert response.status_code == 403, (method, path, header)


@pytest.mark.parametrize("path", ["/etc", "./x", "~", "../x"])
async def test_tcp_client_cannot_name_a_path_even_with_the_key(path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "show": {"model": path},
        "inspect": {"model": path},
        "fit": {"model": path},
        "alias": {"alias": "small", "name": path},
        "import": {"path": path},
    }
    for route, body in bodies.items():
        response = await ask(f"/admin/{route}", "POST", key=KEY, headers=[("X-Api-Key", KEY)], json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden"), route
    response = await ask("/admin/verify", "POST", key=KEY, headers=[("X-Api-Key", KEY)], json={"model": path})
    assert response.status_code == 400


async def test_unexpected_exception_is_a_500_without_details(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Any]:
        raise RuntimeError("secret of the house")

    monkeypatch.setattr(listing, "examined", broken)
    response = await ask("/v1/models")
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text


def test_socket_and_folder_are_private(daemon: Any) -> None:
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(daemon.socket.parent.stat().st_mode) == 0o700
    pid_file = daemon.socket.parent / "daemon.pid"
    assert stat.S_IMODE(pid_file.stat().st_mode) == 0o600
    assert int(pid_file.read_text()) == daemon.pid
    assert int((daemon.socket.parent / "daemon.port").read_text()) == daemon.port


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_connection_of_another_user_is_closed(daemon: Any) -> None:
    reading, writing = os.pipe()
    daemon.socket.chmod(0o666)
    daemon.socket.parent.chmod(0o755)
    daemon.folder.chmod(0o755)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a child of a process with threads may hang
        signal.alarm(20)
        try:
            os.setuid(65534)
            with daemon.local() as client:
                client.get("/health")
            os.write(writing, b"let in")
        except httpx.HTTPError as error:
            os.write(writing, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    daemon.socket.chmod(0o600)
    daemon.socket.parent.chmod(0o700)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        assert said.read() in {b"RemoteProtocolError", b"ReadError"}


def test_peer_uid_reads_the_linux_and_bsd_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeSocket:
        def getsockopt(self, level: int, option: int, size: int) -> bytes:
            return struct.pack("3i", 7, 501, 20) if size == 12 else struct.pack("II", 0, 501) + bytes(size - 8)

    assert connections.peer_uid(FakeSocket()) == 501  # type: ignore[arg-type]
    monkeypatch.setattr(connections.sys, "platform", "darwin")
    assert connections.peer_uid(FakeSocket()) == 501  # type: ignore[arg-type]


def test_address_beyond_loopback_generates_and_requires_a_key(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon(host="0.0.0.0")
    key_file: Path = daemon.folder / "data" / "localllm" / "api-key"
    key = key_file.read_text().strip()
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert len(key) > 30
    url = f"http://127.0.0.1:{daemon.port}/v1/models"
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, headers={"X-Api-Key": key}).status_code == 200
    assert httpx.get(url, headers={"X-Api-Key": key, "Host": "evil.example"}).status_code == 403
    daemon.chat("echo a")
    assert key not in daemon.log
    assert str(key_file) in daemon.log


def test_key_file_that_others_can_read_is_refused(
    start_daemon: Callable[..., Any], short_folder: Callable[[], Path]
) -> None:
    folder = short_folder()
    key_file = folder / "data" / "localllm" / "api-key"
    key_file.parent.mkdir(parents=True)
    key_file.write_text("known to all")
    key_file.chmod(0o644)
    refused = start_daemon(folder, host="0.0.0.0")
    assert refused.said.startswith("storage_failed")
    assert refused.process.wait(100) == 11


def test_configured_key_is_required_on_loopback(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon(api_key="söcret")
    assert httpx.get(f"{daemon.url}/v1/models").status_code == 401
    assert httpx.get(f"{daemon.url}/v1/models", headers={"X-Api-Key": "söcret".encode()}).status_code == 200
    with daemon.local() as client:
        assert client.get("/v1/models").status_code == 200
    assert "söcret" not in daemon.log
