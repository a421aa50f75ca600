"""The entry point of the background daemon, started by `background.start`. Reads the settings as JSON from stdin.

The daemon writes the result of its start to --ready-fd: READY or a Fault. If this pipe closes without a result,
the daemon has crashed.
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
from ..frames import Fault
from .background import READY
from .lifecycle import LOG_FORMAT, run

LOG_BYTES = 2**21  # maximum size of a log file; the daemon keeps the current file and the previous file


def main() -> int:
    parser = argparse.ArgumentParser(prog="localllm.app.daemon")
    parser.add_argument("--ready-fd", type=int, required=True)
    ready_fd: int = parser.parse_args().ready_fd
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=Settings)
    if os.fork():
        os._exit(0)  # the child is the daemon; `background.start` waits only for this parent process
    os.chdir("/")  # otherwise the file system of the start folder could not be unmounted
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
    except OSError as error:  # the daemon must work even if the disk is full
        print(f"cannot open the log file: {error}", file=sys.stderr)
        return logging.NullHandler()


def _tell(ready_fd: int, outcome: bytes) -> None:
    os.write(ready_fd, outcome)
    os.close(ready_fd)


if __name__ == "__main__":
    sys.exit(main())
