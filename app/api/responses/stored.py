"""The file of stored responses: SQLite, bounded, readable by the user alone.

One thread runs all accesses in their order, so that a response can be read as soon as its storage has been requested.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ...errors import AppError, InvalidRequest, PreviousNotFound, ResponseNotFound, StorageFailed

MAX_RESPONSES = 4096
MAX_BYTES = 256 * 2**20  # of all bodies; the least recently used responses are deleted first
MAX_CHAIN = 16 * 2**20  # bytes of the responses before a request
Result = TypeVar("Result")
log = logging.getLogger(__name__)
_SETTINGS = "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA secure_delete = ON;"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS response (
  id TEXT PRIMARY KEY, previous TEXT, reply BLOB NOT NULL, input BLOB NOT NULL, used INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS response_used ON response (used);
"""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response. `reply`: its JSON. `input`: the JSON list of its input items, without those of `previous`."""

    id: str
    previous: str | None
    reply: bytes
    input: bytes

    def context(self) -> list[dict[str, Any]]:
        """The items of the response for the next prompt: its input, then its output."""
        items: list[dict[str, Any]] = msgspec.json.decode(self.input) + msgspec.json.decode(self.reply)["output"]
        return items


class ResponseStore:
    """The stored responses. The methods return futures; a missing response raises ResponseNotFound."""

    def __init__(self, file: Path, *, count: int = MAX_RESPONSES, size: int = MAX_BYTES) -> None:
        """The file is created when the first response is stored."""
        self._file = file
        self._count = count
        self._size = size
        self._thread = ThreadPoolExecutor(1, "responses")
        self._database: sqlite3.Connection | None = None

    def put(self, response: StoredResponse) -> Future[None]:
        """Store a response, and delete others above the limits. A failure is logged."""
        return self._thread.submit(self._put, response)

    def get(self, identifier: str, param: str | None = None) -> Future[StoredResponse]:
        """`param`: the parameter that has the id."""
        return self._thread.submit(lambda: self._chain(identifier, param, depth=1)[0])

    def chain(self, identifier: str, param: str) -> Future[list[StoredResponse]]:
        """A response and all before it, the first one first. Raises InvalidRequest if they are too large."""
        return self._thread.submit(lambda: self._chain(identifier, param, depth=self._count))

    def delete(self, identifier: str) -> Future[None]:
        return self._thread.submit(self._delete, identifier)

    def _put(self, response: StoredResponse) -> None:
        """Store a response. It uses all responses before it, so that the limits do not delete a part of a chain."""

        def insert(database: sqlite3.Connection) -> None:
            row = (response.id, response.previous, response.reply, response.input)
            database.execute("INSERT OR REPLACE INTO response VALUES (?, ?, ?, ?, 0)", row)
            database.execute(
                "WITH RECURSIVE chain(id, previous) AS (SELECT id, previous FROM response WHERE id = ? UNION"
                " SELECT r.id, r.previous FROM response r JOIN chain c ON r.id = c.previous)"
                " UPDATE response SET used = (SELECT max(used) + 1 FROM response) WHERE id IN (SELECT id FROM chain)",
                (response.id,),
            )
            self._trim(database)

        try:
            self._with(insert)
        except StorageFailed as error:
            log.error("response %s is not stored: %s", response.id, error)
            raise

    def _trim(self, database: sqlite3.Connection) -> None:
        """Delete the least recently used responses above the limits."""
        database.execute(
            "DELETE FROM response WHERE id IN (SELECT id FROM (SELECT id, row_number() OVER (ORDER BY used DESC) AS"
            " place, sum(length(reply) + length(input)) OVER (ORDER BY used DESC) AS size FROM response)"
            " WHERE place > ? OR size > ?)",
            (self._count, self._size),
        )

    def _chain(self, identifier: str, param: str | None, *, depth: int) -> list[StoredResponse]:
        def read(database: sqlite3.Connection) -> list[StoredResponse]:
            chain: list[StoredResponse] = []
            name: str | None = identifier
            size = 0
            while name is not None and len(chain) < depth:
                row = database.execute(
                    "SELECT id, previous, reply, input FROM response WHERE id = ?", (name,)
                ).fetchone()
                if row is None:
                    raise _missing(name, param)
                chain.append(StoredResponse(*row))
                size += len(chain[-1].reply) + len(chain[-1].input)
                if size > MAX_CHAIN and depth > 1:
                    raise InvalidRequest(
                        f"{param}: the responses before it have more than {MAX_CHAIN} bytes", param=param
                    )
                name = chain[-1].previous
            return chain[::-1]

        if not self._file.exists():
            raise _missing(identifier, param)
        return self._with(read)

    def _delete(self, identifier: str) -> None:
        def remove(database: sqlite3.Connection) -> int:
            return database.execute("DELETE FROM response WHERE id = ?", (identifier,)).rowcount

        if not self._file.exists() or not self._with(remove):
            raise _missing(identifier, None)
        self._with(lambda database: database.execute("PRAGMA wal_checkpoint(TRUNCATE)"))  # the log has the text, too

    def _with(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """The result of `work` in a transaction. Raises StorageFailed."""
        try:
            with self._connection() as database:
                return work(database)
        except (OSError, sqlite3.Error) as error:
            self._database = None
            raise StorageFailed(f"the stored responses in {self._file}: {error}") from None

    def _connection(self) -> sqlite3.Connection:
        """The database. It is opened at the first use, and again if the user has deleted the file."""
        if self._database is None or not self._file.exists():
            self._file.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._file, os.O_CREAT | os.O_WRONLY, 0o600))
            self._file.chmod(0o600)
            self._database = sqlite3.connect(self._file, timeout=5.0)
            self._database.executescript(_SETTINGS + _SCHEMA)
        return self._database


def _missing(identifier: str, param: str | None) -> AppError:
    """`param`: the parameter of a request that needs the response; None: the path has its id."""
    kind = PreviousNotFound if param else ResponseNotFound
    return kind(
        f"response {identifier[:100]!r} is not stored",
        hint=f"the daemon keeps the {MAX_RESPONSES} responses that were used last, with at most "
        f"{MAX_BYTES // 2**20} MiB, unless their request has store: false",
        param=param,
    )
