"""Binds the TCP socket and the unix socket of the daemon, and finds the API key for TCP clients."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
from ipaddress import ip_address

import psutil

from .. import paths
from ..config import Settings
from ..errors import AppError, ConfigError, PortTaken, StorageFailed

UNREAD_SECONDS = 120  # maximum time without an acknowledgement of sent data; then the kernel closes the TCP connection
LOOPBACK = "127.0.0.1"
MAX_SOCKET_PATH = 103  # bytes; the limit of macOS, which is lower than the limit of Linux


def bind_tcp(settings: Settings) -> list[socket.socket]:
    """The listening sockets: at the host and port of the settings, and on loopback at the port for Ollama's clients,
    if the settings have one. Raises PortTaken or ConfigError."""
    listeners = [_bind(settings.host, settings.port, "port")]
    if settings.ollama_port:
        try:
            listeners.append(_bind(LOOPBACK, settings.ollama_port, "ollama_port"))
        except AppError:
            listeners[0].close()
            raise
    return listeners


def _bind(host: str, port: int, setting: str) -> socket.socket:
    """A listening socket. `setting`: that of the port, for the hint of an error."""
    flag = f"--{setting.replace('_', '-')}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r}: {error}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_SECONDS * 1000)
    try:
        listener.bind(address)
        listener.listen()  # bind alone does not reserve the port
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"port {port} on {host} is in use{_listening_process(port)}",
                hint=f"use another port: setting {setting}, LOCALLLM_{setting.upper()} or serve {flag}"
                + ("; 0: any free port" if setting == "port" else ""),
            ) from None
        raise ConfigError(f"cannot listen at {host} port {port}: {error.strerror}") from None
    return listener


def bind_unix() -> socket.socket:
    """A unix socket in the runtime folder, with mode 0600. The caller must be the `Owner`. Raises StorageFailed."""
    file = paths.socket_file()
    if len(os.fsencode(file)) > MAX_SOCKET_PATH:
        raise StorageFailed(
            f"{file}: the path is too long for a socket (maximum: {MAX_SOCKET_PATH} bytes)",
            hint="set LOCALLLM_RUNTIME_DIR to a shorter path",
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous_mask = os.umask(0o177)
    try:
        file.unlink(missing_ok=True)  # a daemon that was killed leaves the file of its socket
        listener.bind(str(file))
    except OSError as error:
        listener.close()
        raise StorageFailed(f"{file}: {error.strerror}") from None
    finally:
        os.umask(previous_mask)
    return listener


def tcp_key(settings: Settings, address: str) -> str:
    """The API key that TCP clients must send: the key in the settings.

    Without a key in the settings: empty (no key) for a loopback address, a generated key for any other address.

    Raises StorageFailed if the key file cannot be created or is not private.
    """
    if settings.api_key or ip_address(address.split("%")[0]).is_loopback:
        return settings.api_key
    file = paths.api_key_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            pass
        else:
            with os.fdopen(descriptor, "w") as file_object:
                file_object.write(f"{secrets.token_urlsafe(32)}\n")
        status = file.stat()
        key = file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageFailed(f"{file}: {error}") from None
    if not key or status.st_mode & 0o077 or status.st_uid != os.getuid():
        raise StorageFailed(
            f"{file} must be your file, with mode 0600 and a key", hint="delete it to generate a new key"
        )
    return key


def _listening_process(port: int) -> str:
    """The text " by NAME (pid N)" for the process that listens at the port; empty if the process is not visible."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        pass
    return ""
