"""File names of repositories that the cache refuses to store."""

from __future__ import annotations

import pytest

from localllm.app.errors import InvalidRequest
from localllm.app.store.remote import RemoteFile, check_names, is_safe


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../config.json",
        "a/../../config.json",
        "/etc/passwd",
        "a//b",
        "a/",
        "a/./b",
        "..\\config.json",
        "C:\\config.json",
        "c:config.json",
        "con",
        "NUL.json",
        "a/Com1.txt",
        "lpt²",
        "a\x00b",
        "a\nb",
        "a\x7f",
        "config.json ",
        "config.json.",
        "config.json:stream",
        "what?.json",
        "*.json",
        "\ud800.json",
        "x" * 256,
        "ü" * 128,
        "a/" * 600 + "b",
    ],
)
def test_hostile_file_name_is_refused(name: str) -> None:
    assert not is_safe(name)
    with pytest.raises(InvalidRequest, match="unsafe name"):
        check_names("org/x", ["config.json", name])


@pytest.mark.parametrize(
    "name", ["config.json", "a/b/c.json", ".gitattributes", "console.json", "模型.safetensors", "a b.txt", "..a"]
)
def test_ordinary_file_name_is_accepted(name: str) -> None:
    assert is_safe(name)
    check_names("org/x", [name])


@pytest.mark.parametrize(
    "names",
    [
        ["config.json", "Config.json"],
        ["a/X", "A/x"],
        ["stra\u00dfe", "STRASSE"],
        ["\u00e9.json", "e\u0301.json"],
        ["a", "a/b"],
        ["A/b/c", "a/B"],
    ],
)
def test_names_that_a_file_system_cannot_tell_apart_are_refused(names: list[str]) -> None:
    for order in (names, names[::-1]):
        with pytest.raises(InvalidRequest):
            check_names("org/x", order)


def test_key_of_a_file_is_its_etag() -> None:
    assert RemoteFile("a", 1, sha256="f" * 64).key == "f" * 64
    assert RemoteFile("a", 1, git_oid="f" * 40).key == "f" * 40
    assert RemoteFile("a", 1, url="https://x/a").key != RemoteFile("a", 2, url="https://x/a").key
