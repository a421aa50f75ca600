"""The modules of the UI without widgets: texts, conversations, files and the connection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from localllm.app.client import AdapterEntry, LoadedModel, LoadFlags, ModelEntry
from localllm.app.config import Settings
from localllm.app.errors import AppError, DaemonUnreachable, ModelNotFound, WorkerDied
from localllm.app.tui import export, text
from localllm.app.tui.connection import Connection
from localllm.app.tui.conversation import Conversation, Message
from localllm.app.tui.history.store import UNDO_SECONDS, Store

READY = LoadedModel(id="m", state="ready", pid=7, context=32)


def test_texts_are_truncated_at_their_limits() -> None:
    assert [text.one_line("x" * size, 10) for size in (10, 11)] == ["x" * 10, "x" * 9 + "…"]
    assert text.one_line("xxxxxxxx yy", 10) == "xxxxxxxx…"
    assert text.one_line("x" * 200) == "x" * 59 + "…"
    assert text.fold("\n".join("x" * 12)) == ("\n".join("x" * 12), 0)
    assert text.fold("\n".join("x" * 13)) == ("\n".join("x" * 12), 2)
    assert text.fold("x" * 2001) == ("x" * 2000, 1)


def test_rate_of_an_answer_excludes_the_first_token() -> None:
    one = Message(0, None, "assistant", completion_tokens=5, ttft=1.0, seconds=3.0)
    assert one.tokens_per_second == 2.0
    for tokens, ttft in ((1, 1.0), (5, 3.0), (5, 4.0), (0, 1.0)):
        assert Message(0, None, "assistant", completion_tokens=tokens, ttft=ttft, seconds=3.0).tokens_per_second == 0.0


def test_request_follows_the_visible_path() -> None:
    talk = Conversation("m", " \n")
    first = talk.add("user", "x" * 60, parent=None)
    assert (talk.title, first.model, talk.leaf) == ("x" * 47 + "…", "", 0)
    answer = talk.add("assistant", "a", parent=0)
    assert (answer.model, talk.title) == ("m", "x" * 47 + "…")
    failed = talk.add("assistant", "", parent=talk.add("user", "b", parent=1).index)
    last = talk.add("assistant", "", parent=talk.add("user", "c", parent=failed.index).index)
    assert [message["content"] for message in talk.request(last)] == ["x" * 60, "a", "c"]
    assert talk.path(1) == talk.messages[:2]
    assert talk.alternatives(failed) == [failed]
    talk.show(first)
    assert talk.leaf == last.index
    talk.system = "s"
    assert talk.request(answer) == [{"role": "system", "content": "s"}, {"role": "user", "content": "x" * 60}]


@pytest.mark.parametrize(
    ("argument", "name", "kind"),
    [
        ("", "what-is-it.md", "md"),
        ("json", "what-is-it.json", "json"),
        ("md", "what-is-it.md", "md"),
        ("a b.json", "a b.json", "json"),
        ("md a.json", "a.json", "md"),
        ("json  a.md ", "a.md", "json"),
        ("jsonx", "jsonx", "md"),
    ],
)
def test_export_selects_name_and_format(tmp_path: Path, argument: str, name: str, kind: str) -> None:
    talk = Conversation("m", " s ")
    talk.add("user", "What is it?", parent=None)
    for finish, error in (("stopped", ""), ("length", ""), ("failed", "oops"), ("stop", "")):
        clients = talk.add("assistant", "a ", parent=talk.leaf)
        clients.finish, clients.error = finish, error  # type: ignore[assignment]
    file = export.write(talk, argument, tmp_path)
    assert file == tmp_path / name
    written = file.read_text()
    if kind == "json":
        assert json.loads(written)["messages"][0]["content"] == "What is it?"
    else:
        assert written == (
            "# What is it?\n\n**System prompt**\n\ns\n\n## You\n\nWhat is it?\n\n## m\n\na\n\n*(stopped)*"
            "\n\n## m\n\na\n\n*(reached the length limit)*\n\n## m\n\na\n\n*(oops)*\n\n## m\n\na\n"
        )


def test_export_of_a_conversation_without_a_title(tmp_path: Path) -> None:
    talk = Conversation("m")
    talk.add("user", "?!", parent=None)
    talk.title = "?!"
    assert export.write(talk, "", tmp_path).name == "conversation.md"
    talk.title = ""
    assert export.markdown(talk).startswith("# Conversation\n\n## You")
    talk.title = "é" * 60
    assert export.write(talk, "", tmp_path).name == "é" * 48 + ".md"


def test_deleted_conversation_is_purged_after_a_day(tmp_path: Path) -> None:
    now = [1000.0]
    store = Store(tmp_path / "h.sqlite3", lambda: now[0])
    saved = []
    for title in ("one", "two"):
        talk = Conversation("m")
        talk.add("user", title, parent=None)
        store.save(talk, talk.messages)
        saved.append(talk.id)
        now[0] += 1
    store.delete(saved[0])
    for wait, there in ((UNDO_SECONDS, True), (1.0, False)):
        now[0] += wait
        store.close()
        assert len(store.list()) == 1
        if there:
            assert store.load(saved[0]).title == "one"
        else:
            with pytest.raises(AppError, match="no longer"):
                store.load(saved[0])
    store.close()


def test_list_has_the_newest_first_and_a_limit(tmp_path: Path) -> None:
    now = [0.0]
    store = Store(tmp_path / "h.sqlite3", lambda: now[0])
    for number in range(5):
        talk = Conversation("m", title=f"t{number}")
        talk.add("user", f"ab {number} needle", parent=None)
        talk.add("assistant", "x" * 30 + "needle" + "y" * 600, parent=0)
        now[0] += 1
        store.save(talk, talk.messages)
    assert [entry.title for entry in store.list(limit=3)] == ["t4", "t3", "t2"]
    assert [entry.messages for entry in store.list(limit=1)] == [2]
    (entry,) = store.list("ab 3")
    assert (entry.title, entry.excerpt, entry.updated) == ("t3", "ab 3 needle", 4.0)
    assert [entry.title for entry in store.list("T1")] == ["t1"]
    assert store.list()[0].excerpt == ""
    store.close()


class FakeClient:
    """A client with one loaded model, and with errors on demand."""

    def __init__(self) -> None:
        self.over = self.closed = False
        self.error: AppError | None = None
        self.how: list[Any] = []

    async def load(self, model: str, *, on_progress: Any, **how: Any) -> LoadedModel:
        on_progress("reading", 0.5)
        self.how.append((model, how))
        if self.error is not None:
            raise self.error
        return READY

    async def models(self) -> list[ModelEntry]:
        return [ModelEntry(id="m", context=64), ModelEntry(id="n", context=128, bundled=True)]

    async def loaded(self) -> list[LoadedModel]:
        if self.error is not None:
            raise self.error
        return [READY]

    async def adapters(self) -> list[AdapterEntry]:
        return []

    async def close(self) -> None:
        self.closed = True


async def test_connection_follows_the_state_of_the_daemon() -> None:
    clients: list[FakeClient] = []
    states: list[str] = []

    async def connect(settings: Settings, *, start: bool, on_status: Any) -> Any:
        assert start
        on_status("starting the daemon")
        states.append(connection.state)
        clients.append(FakeClient())
        return clients[-1]

    connection = Connection(Settings(), connect, LoadFlags(backend="cpu", quant="int8"))
    changes: list[str] = []
    connection.on_change = lambda: changes.append(connection.state)
    assert connection.is_bundled("guide")
    assert not connection.is_bundled("m")
    assert connection.context("m") == 0
    await connection.use("m")
    assert states == ["starting the daemon"]
    expected = ["loading m", "starting the daemon", "ready", "reading 50%"]
    assert changes == [*expected, "reading 50%", "ready"], "a refresh of the models also calls on_change"
    assert clients[0].how == [("m", {"flags": LoadFlags(backend="cpu", quant="int8"), "exact": True, "for_chat": True})]
    assert (connection.context("m"), connection.context("n"), connection.context("x")) == (32, 128, 0)
    assert (connection.is_bundled("n"), connection.running("m"), connection.running("n")) == (True, READY, None)
    for error, keeps, loaded in (
        (ModelNotFound("x"), True, [READY]),
        (WorkerDied("x"), True, []),
        (DaemonUnreachable("x"), False, []),
    ):
        await connection.refresh()
        client = clients[-1]
        for failing in (connection.use("m"), connection.refresh()):
            client = clients[-1]
            client.error = error
            with pytest.raises(type(error)):
                await failing
            client.error = None
            assert (connection._client is client, connection.loaded) == (keeps, loaded)
            assert connection.state == ("ready" if keeps else "not connected")
            await connection.refresh()
    assert len(clients) == 3
    clients[-1].over = True
    await connection.client()
    assert (len(clients), clients[2].closed, connection.loaded) == (4, True, [])
    await connection.close()
    assert clients[-1].closed


async def test_connection_without_a_daemon_raises() -> None:
    async def connect(*_: Any, **__: Any) -> Any:
        raise DaemonUnreachable("none")

    connection = Connection(Settings(), connect)
    assert connection.state == "connecting"
    with pytest.raises(DaemonUnreachable):
        await connection.client()
    assert connection.state == "not connected"
