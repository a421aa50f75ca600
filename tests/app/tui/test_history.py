"""The history file: saving, search, and errors of the disk."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from pathlib import Path

import pytest

from localllm.app.errors import StorageFailed
from localllm.app.tui.conversation import Conversation
from localllm.app.tui.history.recorder import Recorder
from localllm.app.tui.history.store import UNDO_SECONDS, Store


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Store:
    return Store(tmp_path / "deep" / "history.sqlite3", clock)


def talk(question: str, answer: str = "Yes.") -> Conversation:
    conversation = Conversation("guide", "Be brief.", {"temperature": 0.5, "stop": ["END"]})
    message = conversation.add("user", question, parent=None)
    conversation.add("assistant", answer, parent=message.index).finish = "stop"
    return conversation


def save(store: Store, *conversations: Conversation) -> None:
    for conversation in conversations:
        store.save(conversation, conversation.messages)


def matches(store: Store, words: str) -> list[str]:
    return [entry.title for entry in store.list(words)]


def test_loaded_conversation_equals_the_saved_one(store: Store) -> None:
    conversation = talk("Why?")
    conversation.add("assistant", "No.", parent=0).error = "an error"
    conversation.messages[-1].finish = "failed"
    conversation.show(conversation.messages[1])
    save(store, conversation)
    store.close()
    assert store.load(conversation.id) == conversation


def test_unfinished_answer_is_loaded_as_stopped(store: Store) -> None:
    conversation = talk("Why?")
    conversation.messages[1].finish = ""
    save(store, conversation)
    assert store.load(conversation.id).messages[1].finish == "stopped"


@pytest.mark.parametrize(
    ("words", "titles"),
    [
        ("", ["日本語の質問", "Snakes", "How to unload?"]),
        ("idle_un", ["How to unload?"]),
        ("IDLE", ["How to unload?"]),
        ("unload seconds", ["How to unload?"]),  # both words in one message
        ("snakes", ["Snakes"]),
        ("日本", ["日本語の質問"]),
        ("5%", ["How to unload?"]),
        ("py thon", ["Snakes"]),
        ('"quoted"', ["Snakes"]),
        ("AND OR NOT", []),
        ("nothing like it", []),
        ("'; DROP TABLE message; --", []),
        ("snakes seconds", []),
    ],
)
def test_search(store: Store, words: str, titles: list[str]) -> None:
    save(
        store,
        talk("How to unload?", "Unload by idle_unload, in seconds; 5% is wrong."),
        talk("Snakes", 'A python is "quoted" here.'),
        talk("日本語の質問", "はい"),
    )
    assert matches(store, words) == titles


def test_search_gives_an_excerpt(store: Store) -> None:
    save(store, talk("Tell me", "long " * 100 + "needle in it"))
    assert "needle in it" in store.list("needle")[0].excerpt


def test_search_follows_changes(store: Store) -> None:
    conversation = talk("Tell me", "before")
    save(store, conversation)
    conversation.messages[1].content = "after"
    save(store, conversation)
    assert matches(store, "before") == []
    assert matches(store, "after") == ["Tell me"]


def test_rename_delete_restore_purge(store: Store, clock: Clock) -> None:
    first, second = talk("One"), talk("Two")
    save(store, first, second)
    store.rename(first.id, "Uno")
    assert matches(store, "uno") == ["Uno"]
    store.delete(first.id)
    assert matches(store, "") == ["Two"]
    store.restore(first.id)
    assert matches(store, "") == ["Two", "Uno"]
    store.delete(first.id)
    store.close()
    assert store.load(first.id).title == "Uno"  # can still be restored
    store.close()
    clock.now += UNDO_SECONDS
    with pytest.raises(StorageFailed, match="no longer"):
        store.load(first.id)
    store.close()
    assert b"Uno" not in store.file.read_bytes()


def test_history_file_is_private_and_in_wal_mode(store: Store) -> None:
    save(store, talk("One"))
    assert stat.S_IMODE(store.file.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.file.parent.stat().st_mode) == 0o700
    with sqlite3.connect(store.file) as database:
        assert database.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    database.close()


def test_two_programs_share_the_history_file(store: Store, clock: Clock) -> None:
    other = Store(store.file, clock)
    save(store, talk("One"))
    save(other, talk("Two"))
    assert matches(store, "") == matches(other, "") == ["Two", "One"]


def test_newer_format_is_rejected(store: Store) -> None:
    save(store, talk("One"))
    with sqlite3.connect(store.file) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    store.close()
    with pytest.raises(StorageFailed, match="newer"):
        store.list()


def test_damaged_file_is_not_changed(store: Store) -> None:
    store.file.parent.mkdir()
    store.file.write_bytes(b"not a database, but somebody's text" * 50)
    with pytest.raises(StorageFailed, match="not a database"):
        store.list()
    assert store.file.read_bytes().startswith(b"not a database")


def test_file_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed, match="Cannot use the history file"):
        Store(tmp_path / "file" / "history.sqlite3").list()


def fill(store: Store) -> None:
    """Simulate a full disk: SQLite may not allocate another page."""
    store.list()
    pages = store._database.execute("PRAGMA page_count").fetchone()[0]
    store._database.execute(f"PRAGMA max_page_count = {pages}")


def test_messages_are_saved_after_a_full_disk(store: Store) -> None:
    async def scene() -> None:
        recorder = Recorder(store)
        conversation = talk("One")
        await recorder.save(conversation)
        await recorder._run(fill, store)
        message = conversation.add("user", "x" * 100_000, parent=1)
        conversation.add("assistant", "Yes.", parent=message.index).finish = "stop"
        with pytest.raises(StorageFailed, match="full"):
            await recorder.save(conversation)
        assert len((await recorder.load(conversation.id)).messages) == 2  # the failed save changed nothing
        recorder._final_counts[conversation.id] = 2
        await recorder._run(lambda: store._database.execute("PRAGMA max_page_count = 1000000"))
        await recorder.save(conversation)
        assert await recorder.load(conversation.id) == conversation
        await recorder.close()

    asyncio.run(scene())


def test_read_only_file_is_an_error(store: Store) -> None:
    save(store, talk("One"))
    store._database.execute("PRAGMA query_only = ON")
    with pytest.raises(StorageFailed, match="readonly"):
        save(store, talk("Two"))
    assert matches(store, "") == ["One"]


async def test_recorder_writes_only_new_messages(store: Store) -> None:
    recorder, conversation = Recorder(store), talk("One")
    written: list[list[int]] = []
    plain = store.save
    store.save = lambda head, messages: (written.append([m.index for m in messages]), plain(head, messages))[1]
    await recorder.save(conversation)
    message = conversation.add("user", "more", parent=1)
    answer = conversation.add("assistant", "half", parent=message.index)
    await recorder.save(conversation)
    answer.content, answer.finish = "half and the rest", "stop"
    await recorder.save(conversation)
    await recorder.save(conversation)
    assert written == [[0, 1], [2, 3], [3], []]
    assert await recorder.load(conversation.id) == conversation
    await recorder.close()
