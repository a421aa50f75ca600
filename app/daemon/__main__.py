"""The daemon in the background, as `background.start` runs it: settings come as JSON on stdin.

The start's outcome goes to --ready-fd: READY, or a Fault; the end of file without either means that it died.
"""

from __future__ import annotations

import argparse
import logging
import logging.handlers
import os
import sys

import msgspec

from .. import paths
from ..config import Settings
from ..errors import AppError
from .background import READY
from .frames import Fault
from .lifecycle import LOG_FORMAT, run

LOG_BYTES = 2**21  # twice: the running file and the one before


def main() -> int:
    parser = argparse.ArgumentParser(prog="localllm.app.daemon")
    parser.add_argument("--ready-fd", type=int, required=True)
    ready_fd: int = parser.parse_args().ready_fd
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=Settings)
    if os.fork():
        os._exit(0)  # whoever started us need not wait for our end, nor keep our remains
    os.chdir("/")  # nor is a folder held busy
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, handlers=[_log_file()])
    try:
        run(settings, lambda _: _tell(ready_fd, READY))
    except AppError as error:
        logging.error("%s", error)
        _tell(ready_fd, msgspec.json.encode(Fault.of(error)))
        return error.exit_code
    return 0


def _log_file() -> logging.Handler:
    try:
        folder = paths.log_dir()
        folder.mkdir(parents=True, exist_ok=True)
        return logging.handlers.RotatingFileHandler(
            folder / "daemon.log", maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8"
        )
    except OSError as error:  # a full disk must not keep the daemon from answering
        print(f"cannot open the log file: {error}", file=sys.stderr)
        return logging.NullHandler()


def _tell(ready_fd: int, words: bytes) -> None:
    os.write(ready_fd, words)
    os.close(ready_fd)


if __name__ == "__main__":
    sys.exit(main())
