"""Host names and web origins in the settings, which the daemon compares with the headers of requests.

A browser sends one spelling of a name. The functions convert other spellings to it, and refuse a text that no browser
sends: it would silently allow nothing.
"""

from __future__ import annotations

import ipaddress
import re

_NAME = re.compile(r"(?=.{1,254}\Z)[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_]([a-z0-9_-]{0,62}))*\.?")
_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\[[^\]]*\]|[^:/?#\[\]@]*)(?::(?P<port>[0-9]{1,5}))?/?")
_DEFAULT_PORTS = {"http": 80, "https": 443}


def host_name(text: str) -> str:
    """A host name or an IP address as in a Host header without port and brackets. Raises ValueError with the reason."""
    _check_characters(text)
    name = text.lower()
    if "://" in name or "/" in name:
        raise ValueError("a host name has no scheme and no path")
    if re.fullmatch(r"\[.*\]", name) or name.count(":") > 1:
        return _address(name.removeprefix("[").removesuffix("]"))
    if ":" in name:
        raise ValueError("a host name has no port: it is accepted with every port")
    return _name(name)


def origin(text: str) -> str:
    """A web origin as in the header Origin. Raises ValueError with the reason."""
    _check_characters(text)
    match = _ORIGIN.fullmatch(text.lower())
    if match is None:
        raise ValueError("an origin is SCHEME://HOST or SCHEME://HOST:PORT, without a path")
    host = match["host"]
    host = f"[{_address(host[1:-1])}]" if host.startswith("[") else _name(host)
    port = int(match["port"]) if match["port"] else _DEFAULT_PORTS.get(match["scheme"])
    if port is not None and not 0 < port < 2**16:
        raise ValueError(f"{port} is not a port")
    if port == _DEFAULT_PORTS.get(match["scheme"]):  # browsers omit it
        return f"{match['scheme']}://{host}"
    return f"{match['scheme']}://{host}:{port}"


def _check_characters(text: str) -> None:
    if not text:
        raise ValueError("it is empty")
    if "*" in text or "?" in text:
        raise ValueError("patterns are not supported: list each name")
    if not text.isascii():
        raise ValueError("browsers send names in ASCII (xn--…)")
    if not text.isprintable() or " " in text or "," in text:
        raise ValueError("it has spaces, commas or control characters")


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:100]!r} is not a host name")
    if re.fullmatch(r"[0-9.]+", name):
        return _address(name)
    return name


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ValueError(f"{text[:100]!r} is not an IP address") from None
