"""Runs a daemon with fake workers: `run_daemon.py SETTINGS-AS-JSON`. Prints the URL when it accepts requests."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import msgspec

from localllm.app.api import keep_alive
from localllm.app.config import Settings
from localllm.app.daemon import connection, lifecycle, loading, process
from localllm.app.errors import AppError

# Instead of a probe: every backend but npu can run a fake worker.
FAKE_CHECK = (
    sys.executable,
    "-c",
    """
import sys
if sys.argv[1] == "npu":
    print('{"code": "backend_unavailable", "message": "backend npu cannot be used"}')
""",
)
FAKE_WORKER = (sys.executable, str(Path(__file__).parent / "fake_worker.py"))

if __name__ == "__main__":
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    logging.basicConfig(level=logging.INFO, format=lifecycle.LOG_FORMAT, stream=sys.stderr)
    process.STOP_SECONDS = 1.0
    if "TEST_WORKER" not in os.environ:
        loading.CHECK = FAKE_CHECK
    process.WATCH_SECONDS = float(os.environ.get("TEST_WATCH_SECONDS", process.WATCH_SECONDS))
    process.LOAD_SECONDS = float(os.environ.get("TEST_LOAD_SECONDS", process.LOAD_SECONDS))
    process.ANSWER_SECONDS = float(os.environ.get("TEST_ANSWER_SECONDS", process.ANSWER_SECONDS))
    connection.HEAD_SECONDS = float(os.environ.get("TEST_HEAD_SECONDS", connection.HEAD_SECONDS))
    keep_alive.SECONDS = float(os.environ.get("TEST_KEEP_ALIVE_SECONDS", keep_alive.SECONDS))
    try:
        worker = json.loads(os.environ.get("TEST_WORKER", json.dumps(FAKE_WORKER)))
        lifecycle.run(settings, lambda at: print(at.url, flush=True), worker_command=worker)
    except AppError as error:
        print(f"{error.code}: {error.message} ({error.hint})", flush=True)
        sys.exit(error.exit_code)
