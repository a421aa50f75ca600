"""The entry point of the background daemon, which `background.start` runs. It reads the settings as JSON from stdin.

It writes the result of the start to --ready-fd: READY or a Fault. An end of file without either means that it died.
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

LOG_BYTES = 2**21  # of one log file; there are two, the current one and the previous one


def main() -> int:
    parser = argparse.ArgumentParser(prog="localllm.app.daemon")
    parser.add_argument("--ready-fd", type=int, required=True)
    ready_fd: int = parser.parse_args().ready_fd
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=Settings)
    if os.fork():
        os._exit(0)  # the child is the daemon; the process that started it has only this parent to wait for
    os.chdir("/")  # or else the daemon would keep the start folder busy
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


def _tell(ready_fd: int, outcome: bytes) -> None:
    os.write(ready_fd, outcome)
    os.close(ready_fd)


if __name__ == "__main__":
    sys.exit(main())
