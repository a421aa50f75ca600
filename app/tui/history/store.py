"""The history file: conversations in SQLite, with full-text search. Synchronous, for one thread.

Search is by substring (FTS5 trigrams), so it works within words and in languages without spaces. Terms of fewer than 3
characters use a scan. A deleted conversation can be restored for a day; then it is purged.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...errors import StorageFailed
from ..conversation import Conversation, Message
from ..text import one_line

VERSION = 1
UNDO_SECONDS = 24 * 3600.0
EXCERPT_LEAD = 20  # number of characters that an excerpt shows before the first match

_SCHEMA = """
CREATE TABLE conversation (
  id TEXT PRIMARY KEY, title TEXT NOT NULL, model TEXT NOT NULL, system TEXT NOT NULL, parameters TEXT NOT NULL,
  leaf INTEGER, created REAL NOT NULL, updated REAL NOT NULL, deleted REAL);
CREATE TABLE message (
  id INTEGER PRIMARY KEY, conversation TEXT NOT NULL REFERENCES conversation(id) ON DELETE CASCADE,
  place INTEGER NOT NULL, content TEXT NOT NULL, rest TEXT NOT NULL, UNIQUE (conversation, place));
CREATE VIRTUAL TABLE search USING fts5(content, content=message, content_rowid=id, tokenize=trigram);
CREATE TRIGGER message_added AFTER INSERT ON message BEGIN
  INSERT INTO search(rowid, content) VALUES (new.id, new.content); END;
CREATE TRIGGER message_removed AFTER DELETE ON message BEGIN
  INSERT INTO search(search, rowid, content) VALUES ('delete', old.id, old.content); END;
CREATE TRIGGER message_changed AFTER UPDATE ON message BEGIN
  INSERT INTO search(search, rowid, content) VALUES ('delete', old.id, old.content);
  INSERT INTO search(rowid, content) VALUES (new.id, new.content); END;
"""


@dataclass(frozen=True)
class Entry:
    """A conversation in the list. `excerpt` is the text around the first word of a search; empty: no search."""

    id: str
    title: str
    model: str
    updated: float
    messages: int
    excerpt: str = ""


class Store:
    """The history file. Methods raise StorageFailed. A failed write does not change the file."""

    def __init__(self, file: Path, now: Callable[[], float] = time.time) -> None:
        self.file = file
        self._now = now
        self._database: sqlite3.Connection | None = None

    def save(self, head: Conversation, messages: list[Message]) -> None:
        """Write the fields of a conversation except its messages, and `messages`: those that are new or changed."""
        now = self._now()
        with self._transaction() as database:
            database.execute(
                "INSERT INTO conversation (id, title, model, system, parameters, leaf, created, updated)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET title = excluded.title,"
                " model = excluded.model, system = excluded.system, parameters = excluded.parameters,"
                " leaf = excluded.leaf, updated = excluded.updated",
                (head.id, head.title, head.model, head.system, json.dumps(head.parameters), head.leaf, now, now),
            )
            for message in messages:
                rest = {name: value for name, value in msgspec.to_builtins(message).items() if name != "content"}
                database.execute(
                    "INSERT INTO message (conversation, place, content, rest) VALUES (?, ?, ?, ?) ON CONFLICT"
                    " (conversation, place) DO UPDATE SET content = excluded.content, rest = excluded.rest",
                    (head.id, message.index, message.content, json.dumps(rest)),
                )

    def list(self, words: str = "", limit: int = 200) -> list[Entry]:
        """The conversations, the most recent first.

        With `words`: only conversations that have all words in one message, or all words in the title.
        """
        terms = words.split()
        condition = "c.deleted IS NULL"
        values = []
        excerpt = "''"
        if terms:
            in_text, text_values = _contains(terms)
            in_title = " AND ".join(["instr(lower(c.title), lower(?)) > 0"] * len(terms))
            matches = f"FROM search JOIN message m ON m.id = search.rowid WHERE {in_text}"
            condition += f" AND (c.id IN (SELECT m.conversation {matches}) OR ({in_title}))"
            excerpt = f"(SELECT m.content {matches} AND m.conversation = c.id LIMIT 1)"
            values = [*text_values, *text_values, *terms]
        with self._transaction() as database:
            rows = database.execute(
                f"SELECT c.id, c.title, c.model, c.updated,"
                f" (SELECT count(*) FROM message n WHERE n.conversation = c.id), {excerpt} FROM conversation c"
                f" WHERE {condition} ORDER BY c.updated DESC, c.rowid DESC LIMIT ?",
                (*values, limit),
            ).fetchall()
        entries = []
        for id, title, model, updated, count, text in rows:
            entries.append(Entry(id, title, model, updated, count, _excerpt(text or "", terms)))
        return entries

    def load(self, id: str) -> Conversation:
        with self._transaction() as database:
            row = database.execute(
                "SELECT model, system, parameters, id, title, leaf FROM conversation WHERE id = ?", (id,)
            ).fetchone()
            if row is None:
                raise StorageFailed("This conversation is no longer in the history.")
            messages = [
                msgspec.convert({**json.loads(rest), "content": content}, Message)
                for content, rest in database.execute(
                    "SELECT content, rest FROM message WHERE conversation = ? ORDER BY place", (id,)
                )
            ]
        for message in messages:
            if message.role == "assistant" and not message.finish:
                message.finish = "stopped"  # localllm ended before the answer did
        return Conversation(row[0], row[1], json.loads(row[2]), row[3], row[4], messages, row[5])

    def rename(self, id: str, title: str) -> None:
        with self._transaction() as database:
            database.execute("UPDATE conversation SET title = ? WHERE id = ?", (title, id))

    def delete(self, id: str) -> None:
        """Remove a conversation from the list. `restore` can undo this for a day."""
        with self._transaction() as database:
            database.execute("UPDATE conversation SET deleted = ? WHERE id = ?", (self._now(), id))

    def restore(self, id: str) -> None:
        with self._transaction() as database:
            database.execute("UPDATE conversation SET deleted = NULL WHERE id = ?", (id,))

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            if self._database is None:
                self._database = self._connect()
            with self._database:
                yield self._database
        except (sqlite3.Error, OSError, ValueError) as error:
            raise StorageFailed(
                f"Cannot use the history file: {error}.", hint=f"The chat continues without saving. File: {self.file}"
            ) from None

    def _connect(self) -> sqlite3.Connection:
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(self.file, os.O_RDWR | os.O_CREAT, 0o600))  # set the file mode before SQLite writes
        database = sqlite3.connect(self.file, timeout=5.0)
        try:
            for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON", "secure_delete = ON"):
                database.execute(f"PRAGMA {pragma}")
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version > VERSION:
                raise sqlite3.DatabaseError(f"written by a newer localllm (format {version}, supported: {VERSION})")
            if version == 0:
                database.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
            with database:
                purge = "DELETE FROM conversation WHERE deleted < ?"
                if database.execute(purge, (self._now() - UNDO_SECONDS,)).rowcount:
                    # removes the words of purged messages from the index
                    database.execute("INSERT INTO search(search) VALUES ('optimize')")
        except sqlite3.Error:
            database.close()
            raise
        return database


def _contains(terms: list[str]) -> tuple[str, list[str]]:
    """(SQL condition for rows of `search` with all terms, its values)"""
    phrases = []
    short = []
    for term in terms:
        if len(term) < 3:
            short.append(term)
        else:
            escaped = term.replace('"', '""')
            phrases.append(f'"{escaped}"')
    conditions = ["instr(lower(m.content), lower(?)) > 0"] * len(short)
    if not phrases:
        return " AND ".join(conditions), short
    return " AND ".join(["search MATCH ?", *conditions]), [" AND ".join(phrases), *short]


def _excerpt(content: str, terms: list[str]) -> str:
    """The text around the first term in `content`."""
    positions = [content.lower().find(term.lower()) for term in terms]
    first = min((position for position in positions if position >= 0), default=0)
    start = max(0, first - EXCERPT_LEAD)
    line = one_line(content[start : start + 400], 70)
    return f"…{line}" if start else line
