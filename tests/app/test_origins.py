"""Host names and web origins: their spelling in headers, and the texts that no browser sends."""

from __future__ import annotations

import pytest

from localllm.app.origins import host_name, origin


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("box.lan", "box.lan"),
        ("BOX.lan", "box.lan"),
        ("my_box", "my_box"),
        ("box.lan.", "box.lan."),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("192.168.7.7", "192.168.7.7"),
        ("[FD00::1]", "fd00::1"),
        ("fd00:0:0::1", "fd00::1"),
    ],
)
def test_host_name(text: str, name: str) -> None:
    assert host_name(text) == name


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "empty"),
        ("*", "patterns"),
        ("*.example", "patterns"),
        ("box?.lan", "patterns"),
        ("http://box.lan", "scheme"),
        ("box.lan/", "path"),
        ("box.lan:80", "port"),
        ("localhost:*", "patterns"),
        ("[::1]:80", "not an IP address"),
        ("[box]", "not an IP address"),
        ("300.1.1.1", "not an IP address"),
        (" box.lan", "spaces"),
        ("box.lan\n", "control"),
        ("a b", "spaces"),
        ("a,b", "commas"),
        ("bücher.example", "ASCII"),
        ("user@box.lan", "not a host name"),
        (".lan", "not a host name"),
        ("a..b", "not a host name"),
        ("-a", "not a host name"),
        ("a" * 64, "not a host name"),
    ],
)
def test_text_that_is_no_host_name(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        host_name(text)


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("https://app.example", "https://app.example"),
        ("HTTPS://App.example/", "https://app.example"),
        ("https://app.example:443", "https://app.example"),
        ("http://app.example:80/", "http://app.example"),
        ("http://app.example:443", "http://app.example:443"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://127.0.0.1:0080", "http://127.0.0.1"),
        ("http://[0:0::1]:8080", "http://[::1]:8080"),
        ("chrome-extension://abcdefgh", "chrome-extension://abcdefgh"),
        ("tauri://localhost", "tauri://localhost"),
    ],
)
def test_origin(text: str, sent: str) -> None:
    assert origin(text) == sent


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "empty"),
        ("*", "patterns"),
        ("http://*.example", "patterns"),
        ("https://localhost:*", "patterns"),
        ("null", "SCHEME://HOST"),
        ("app.example", "SCHEME://HOST"),
        ("localhost:3000", "SCHEME://HOST"),
        ("//app.example", "SCHEME://HOST"),
        ("https:/app.example", "SCHEME://HOST"),
        ("https://app.example/x", "SCHEME://HOST"),
        ("https://app.example#x", "SCHEME://HOST"),
        ("https://app.example//", "SCHEME://HOST"),
        ("https://user@app.example", "SCHEME://HOST"),
        ("https://app.example:", "SCHEME://HOST"),
        ("https://app.example:x", "SCHEME://HOST"),
        ("https://app.example:0", "0 is not a port"),
        ("https://app.example:65536", "65536 is not a port"),
        ("https://", "not a host name"),
        ("file://", "not a host name"),
        ("https://[::1", "SCHEME://HOST"),
        ("https://[x]", "not an IP address"),
        ("https://app.example ", "spaces"),
        ("https://a.example,https://b.example", "commas"),
        ("https://bücher.example", "ASCII"),
    ],
)
def test_text_that_is_no_origin(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        origin(text)
