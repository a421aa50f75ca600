"""The file of stored responses, and its limits."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from localllm.app.api.responses import stored
from localllm.app.api.responses.stored import ResponseStore, StoredResponse
from localllm.app.errors import InvalidRequest, PreviousNotFound, ResponseNotFound, StorageFailed


def response(name: str, previous: str | None = None, size: int = 0) -> StoredResponse:
    return StoredResponse(name, previous, b'{"output":["out %s"]}' % name.encode(), b'["in"%s]' % (b" " * size))


def names(store: ResponseStore, *candidates: str) -> list[str]:
    """The responses that are stored, without a change of their use."""
    with closing(sqlite3.connect(store._file)) as database:
        with_ids = {row[0] for row in database.execute("SELECT id FROM response")}
    return [name for name in candidates if name in with_ids]


def test_a_chain_has_all_responses_in_their_order(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "folder" / "file")
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("d", "a")):
        store.put(response(name, previous)).result()
    chain = ResponseStore(tmp_path / "folder" / "file").chain("c", "x").result()
    assert [entry.id for entry in chain] == ["a", "b", "c"]
    assert chain[1].context() == ["in", "out b"]
    store.delete("b").result()
    with pytest.raises(PreviousNotFound, match="'b' is not stored") as missing:
        store.chain("c", "x").result()
    assert missing.value.param == "x"
    with pytest.raises(ResponseNotFound):
        store.delete("b").result()


def test_the_least_recently_used_responses_are_deleted(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "file", count=3)
    for name, previous in (("a", None), ("b", "a"), ("c", None)):
        store.put(response(name, previous)).result()
    store.put(response("d", "b")).result()  # uses a and b, too
    assert names(store, *"abcd") == ["a", "b", "d"]


def test_the_size_has_a_limit(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "file", size=1000)
    for name in "abcd":
        store.put(response(name, size=400)).result()
    assert names(store, *"abcd") == ["c", "d"]


def test_a_chain_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAX_CHAIN", 1000)
    store = ResponseStore(tmp_path / "file")
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        store.put(response(name, previous, size=400)).result()
    assert len(store.chain("b", "x").result()) == 2
    with pytest.raises(InvalidRequest, match="more than 1000 bytes") as refused:
        store.chain("c", "x").result()
    assert refused.value.param == "x"
    assert store.get("c").result().id == "c"


def test_only_the_user_can_read_the_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch(0o644)
    ResponseStore(file).put(response("a")).result()
    assert file.stat().st_mode & 0o777 == 0o600
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())


def test_a_deleted_response_leaves_no_text(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "file")
    store.put(StoredResponse("a", None, b"{}", b'["secret"]')).result()
    store.delete("a").result()
    assert not any(b"secret" in path.read_bytes() for path in tmp_path.iterdir())


def test_a_deleted_file_is_created_again(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "folder" / "file")
    store.put(response("a")).result()
    shutil.rmtree(tmp_path / "folder")
    with pytest.raises(ResponseNotFound):
        store.get("a").result()
    store.put(response("b")).result()
    assert ResponseStore(tmp_path / "folder" / "file").get("b").result().id == "b"


def test_a_damaged_file_is_an_error_with_its_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"no database" * 100)
    store = ResponseStore(file)
    with pytest.raises(StorageFailed, match=str(file)):
        store.get("a").result()
    with caplog.at_level(logging.ERROR), pytest.raises(StorageFailed):
        store.put(response("a")).result()
    assert "response a is not stored" in caplog.text
    with pytest.raises(ResponseNotFound):
        ResponseStore(tmp_path / "missing").get("a").result()
    assert not (tmp_path / "missing").exists()
