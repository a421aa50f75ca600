"""A real daemon on a free port, with fake workers and temporary folders."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.app.developer import OF_THE_DAEMON

RUN_DAEMON = Path(__file__).parent / "run_daemon.py"
MODELS = ("echo", "broken", "dies", "slow", "stubborn", "other")


class Daemon:
    """A daemon process. `said` is the first line of its output: its URL, or the error of its start."""

    def __init__(self, folder: Path, *, env: dict[str, str] | None = None, **settings: Any) -> None:
        self.folder = folder
        self.env = environment(folder) | (env or {})
        self.http = httpx.Client(timeout=100, trust_env=False)
        developer = {name: settings.pop(name) for name in OF_THE_DAEMON & settings.keys()}
        asked = {"port": 0, "developer": {"drain": 1.0} | developer} | settings
        self.errors = (folder / "stderr").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, str(RUN_DAEMON), json.dumps(asked)],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=self.env,
            text=True,
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()

    @property
    def url(self) -> str:
        """The URL of the daemon. Fails with the log if the daemon did not start."""
        assert self.said.startswith("http"), f"the daemon did not start: {self.said}\n{self.log}"
        return self.said

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def socket(self) -> Path:
        return self.folder / "run" / "daemon.sock"

    @property
    def log(self) -> str:
        return (self.folder / "stderr").read_text()

    def local(self) -> httpx.Client:
        """A client on the unix socket."""
        return httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://localhost")

    def loaded(self) -> dict[str, dict[str, Any]]:
        with self.local() as client:
            return {model["id"]: model for model in client.get("/admin/loaded").json()}

    def chat(self, words: str, **more: Any) -> httpx.Response:
        body = {"model": "test/echo", "messages": [{"role": "user", "content": words}]} | more
        return self.http.post(f"{self.url}/v1/chat/completions", json=body)

    def stop(self) -> int:
        """Send SIGTERM; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=100)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.errors.close()
            self.http.close()


def events(text: str) -> list[Any]:
    """The server-sent events of a response."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def deaths(daemon: Daemon) -> float:
    """The number of unexpected ends of workers in /metrics."""
    lines = httpx.get(f"{daemon.url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("localllm_worker_restarts_total{"))


def until(pool: Executor, daemon: Daemon, **more: Any) -> tuple[Future[httpx.Response], Callable[[], None]]:
    """Request an answer that lasts until a file exists; returns the response and a function that creates the file."""
    end = daemon.folder / "end"
    end.unlink(missing_ok=True)
    return pool.submit(daemon.chat, f"until {end}", **more), end.touch


def snapshot(daemon: Daemon, name: str) -> Path:
    """The folder of the model test/NAME."""
    return daemon.folder / "hub" / f"models--test--{name}" / "snapshots" / "0123456789abcdef"


def environment(folder: Path) -> dict[str, str]:
    """The environment of a daemon that reads and writes only below this folder."""
    for name in MODELS:
        repo = folder / "hub" / f"models--test--{name}"
        snapshot = repo / "snapshots" / "0123456789abcdef"
        if not snapshot.exists():
            snapshot.mkdir(parents=True)
            (repo / "refs").mkdir()
            (repo / "refs" / "main").write_text("0123456789abcdef")
            (snapshot / "config.json").write_text('{"model_type": "fake", "max_position_embeddings": 64}')
            (snapshot / "model.safetensors").write_bytes(b"")
            if name == "echo":
                (snapshot / "modules.json").write_text("[]")  # an embedding model
    return {name: value for name, value in os.environ.items() if not name.startswith(("LOCALLLM_", "HF_", "XDG_"))} | {
        "HOME": str(folder),
        "HF_HUB_CACHE": str(folder / "hub"),
        "XDG_STATE_HOME": str(folder / "state"),
        "XDG_DATA_HOME": str(folder / "data"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "LOCALLLM_RUNTIME_DIR": str(folder / "run"),
    }


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Callable[[], Path]]:
    """Creates folders with short names: a path below a folder of pytest may be too long for a socket."""
    folders: list[Path] = []

    def make() -> Path:
        folders.append(Path(tempfile.mkdtemp(prefix="lll-")))
        return folders[-1]

    yield make
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def daemon(short_folder: Callable[[], Path]) -> Iterator[Daemon]:
    """One daemon for the tests of a module, which leave it unchanged."""
    running = Daemon(short_folder(), max_body_mib=1, max_queue=300)
    assert running.url
    yield running
    code = running.stop()
    assert code == 0, running.log
    assert "Traceback" not in running.log, running.log


@pytest.fixture
def start_daemon(short_folder: Callable[[], Path]) -> Iterator[Callable[..., Daemon]]:
    """Starts daemons with the settings of a test. Two daemons with the same `folder` share their files."""
    started: list[Daemon] = []

    def start(folder: Path | None = None, env: dict[str, str] | None = None, **settings: Any) -> Daemon:
        started.append(Daemon(folder or short_folder(), env=env, **settings))
        return started[-1]

    yield start
    for one in started:
        one.stop()
