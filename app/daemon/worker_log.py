"""Copies the output of a worker process to a log file of limited size, and finds the reason of a crash in it."""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import re
from pathlib import Path

LOG_BYTES = 2**20  # maximum size of a log file; a worker has the current file and the previous file
READ_BYTES = 2**16  # bytes per read; a longer line is split
REASON_CHARACTERS = 300  # maximum length of the reason of a crash

_CRITICAL = re.compile(rb"^\S+ \S+ CRITICAL (.+)", re.MULTILINE)  # a line as the worker formats it, after its time

log = logging.getLogger(__name__)


def log_name(model: str) -> str:
    """The name of the log file of a model's worker."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "--", model)
    return f"worker-{safe.strip('-')[-100:]}.log"


async def copy_output(output: asyncio.StreamReader, folder: Path, model: str) -> str:
    """Copy the output of a worker to its log file until the end of the output. Returns the text of the last line with
    the level CRITICAL, in which a library gives the reason why it ends the process; empty if there is none.

    If the file cannot be opened, the output is read and dropped, because a full pipe would stop the worker.
    """
    sink = _open_log(folder, model)
    reason = b""
    unfinished = b""  # the start of a line whose end has not arrived
    while data := await output.read(READ_BYTES):
        lines, newline, unfinished = (unfinished + data).rpartition(b"\n")
        if newline:
            _write(sink, lines)
            reason = (_CRITICAL.findall(lines) or [reason])[-1]
        if len(unfinished) > READ_BYTES:
            _write(sink, unfinished)
            unfinished = b""
    if unfinished:
        _write(sink, unfinished)
    sink.close()
    return reason.decode("utf-8", "replace")[:REASON_CHARACTERS]


def _open_log(folder: Path, model: str) -> logging.Handler:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return logging.handlers.RotatingFileHandler(
            folder / log_name(model), maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8", errors="replace"
        )
    except OSError as error:
        log.warning("cannot open the log of the worker of %s: %s", model, error)
        return logging.NullHandler()


def _write(sink: logging.Handler, lines: bytes) -> None:
    text = lines.decode("utf-8", "replace")
    sink.emit(logging.LogRecord(__name__, logging.INFO, "", 0, "%s", (text,), None))
