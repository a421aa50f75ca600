"""The sockets of the daemon, and the API key of each address."""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.app import paths
from localllm.app.config import Settings
from localllm.app.daemon import listeners
from localllm.app.daemon.listeners import bind_tcp, bind_unix, tcp_key
from localllm.app.daemon.owner import Owner, owner_pid
from localllm.app.errors import ConfigError, PortTaken, StorageFailed


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "data" / "api-key"
    monkeypatch.setattr(paths, "api_key_file", lambda: file)
    return file


@pytest.fixture
def runtime(short_folder: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = short_folder() / "run"
    monkeypatch.setenv("LOCALLLM_RUNTIME_DIR", str(folder))
    return folder


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1", "::1%lo"])
def test_loopback_needs_no_key(key_file: Path, address: str) -> None:
    assert tcp_key(Settings(), address) == ""
    assert tcp_key(Settings(api_key="mine"), address) == "mine"
    assert not key_file.exists()


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.168.1.1", "fe80::1%eth0"])
def test_other_addresses_need_a_key(key_file: Path, address: str) -> None:
    assert tcp_key(Settings(api_key="mine"), address) == "mine"
    assert not key_file.exists()
    key = tcp_key(Settings(), address)
    assert len(key) >= 32
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert tcp_key(Settings(), address) == key, "the key of an existing file does not change"


@pytest.mark.parametrize(
    ("text", "mode"), [(b"key", 0o640), (b"key", 0o604), (b"key", 0o601), (b" \n", 0o600), (b"k\xc3\xa9y", 0o600)]
)
def test_key_file_that_is_not_private_or_is_empty_is_refused(key_file: Path, text: bytes, mode: int) -> None:
    key_file.parent.mkdir()
    key_file.write_bytes(text)
    key_file.chmod(mode)
    with pytest.raises(StorageFailed, match="api-key"):
        tcp_key(Settings(), "0.0.0.0")
    assert key_file.read_bytes() == text


def test_key_file_of_another_user_is_refused(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tcp_key(Settings(), "0.0.0.0")
    monkeypatch.setattr(listeners.os, "getuid", lambda: key_file.stat().st_uid + 1)
    with pytest.raises(StorageFailed, match="must be your file"):
        tcp_key(Settings(), "0.0.0.0")


def test_key_that_cannot_be_written_is_an_error(key_file: Path) -> None:
    key_file.parent.write_text("no folder")
    with pytest.raises(StorageFailed):
        tcp_key(Settings(), "0.0.0.0")


def test_bind_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    (listener,) = bind_tcp(Settings(port=0))
    with listener:
        port = listener.getsockname()[1]
        assert port
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        if sys.platform == "linux":
            assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
        with pytest.raises(PortTaken, match=f"port {port} on 127.0.0.1 is in use by .*{os.getpid()}"):
            bind_tcp(Settings(port=port))
    for host in ("192.0.2.1", "no..host"):
        with pytest.raises(ConfigError, match=host):
            bind_tcp(Settings(host=host, port=0))


def test_second_port_is_on_loopback() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        with pytest.raises(PortTaken, match=f"port {port} ") as refused:
            bind_tcp(Settings(host="0.0.0.0", port=0, ollama_port=port))
        assert "ollama_port" in refused.value.hint
    first, second = bind_tcp(Settings(host="0.0.0.0", port=0, ollama_port=port))
    with first, second:
        assert first.getsockname()[0] == "0.0.0.0"
        assert second.getsockname() == ("127.0.0.1", port)


def test_bind_unix(runtime: Path) -> None:
    before = os.umask(0o022)
    try:
        for _ in range(2):  # the second call replaces the socket of the first
            with bind_unix() as listener:
                assert listener.getsockname() == str(runtime / "daemon.sock")
                assert stat.S_IMODE((runtime / "daemon.sock").stat().st_mode) == 0o600
        assert os.umask(0o022) == 0o022, "the umask is restored"
    finally:
        os.umask(before)


@pytest.mark.parametrize(("length", "taken"), [(103, True), (104, False)])
def test_maximum_length_of_a_socket_path(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, length: int, taken: bool
) -> None:
    runtime.mkdir()
    file = runtime / ("x" * (length - len(str(runtime)) - 1))
    monkeypatch.setattr(paths, "socket_file", lambda: file)
    if taken:
        bind_unix().close()
        return
    with pytest.raises(StorageFailed, match=r"too long for a socket .maximum: 103 bytes"):
        bind_unix()


def test_starting_owner_has_pid_0(runtime: Path) -> None:
    Owner().release()
    (runtime / "daemon.pid").write_text("4711\n")  # file of a daemon that was killed
    owner = Owner()
    try:
        assert owner_pid() == 0
        with pytest.raises(PortTaken) as caught:
            Owner()
        assert "pid" not in caught.value.message
        owner.publish(1)
        assert owner_pid() == os.getpid()
    finally:
        owner.release()
    assert list(runtime.iterdir()) == []
