"""Start and end of the daemon: one owner, correct files, drained requests."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.app import paths
from localllm.app.config import Settings
from localllm.app.daemon import background, lifecycle
from localllm.app.daemon.connection import MAX_HEAD, Connection
from localllm.app.daemon.owner import Owner, owner_pid
from localllm.app.developer import Developer
from localllm.app.errors import ConfigError, DaemonUnreachable, PortTaken, StorageFailed

from ...waiting import wait_until
from .conftest import Daemon, environment, until

Start = Callable[..., Daemon]


@pytest.fixture
def folder(short_folder: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for daemons; this process uses the same runtime folder, models and logs."""
    made = short_folder()
    for name, value in environment(made).items():
        monkeypatch.setenv(name, value)
    yield made
    pid = owner_pid()
    if pid:
        os.kill(pid, signal.SIGKILL)


def test_sigterm_waits_for_running_answers(start_daemon: Start) -> None:
    daemon = start_daemon(drain=30.0)
    daemon.chat("echo a")
    with ThreadPoolExecutor(2) as pool:
        (streamed, end), (whole, _) = until(pool, daemon, stream=True), until(pool, daemon)
        wait_until(lambda: daemon.loaded()["test/echo"]["cache_used"] == 2)
        daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{daemon.url}/health").json()["status"] == "stopping")
        refused = daemon.chat("echo a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_stopping")
        assert "retry-after" in refused.headers
        end()
        assert streamed.result().text.endswith("data: [DONE]\n\n")
        assert whole.result().json()["choices"][0]["finish_reason"] == "stop"
    assert daemon.process.wait(100) == 0
    assert not list((daemon.folder / "run").iterdir())


@pytest.mark.parametrize("stream", [False, True])
def test_answer_longer_than_the_drain_gets_an_error(start_daemon: Start, stream: bool) -> None:
    daemon = start_daemon(drain=0.2)
    daemon.chat("echo a")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(daemon.chat, "slow 100000", stream=stream)
        wait_until(lambda: daemon.loaded()["test/echo"]["cache_used"] == 1)
        assert daemon.stop() == 0
        text = answer.result().text
    error = json.loads(text.rpartition("data: ")[2])["error"]
    assert (error["code"], error["message"]) == ("server_stopping", "the daemon is stopping")


def test_second_signal_stops_at_once(start_daemon: Start) -> None:
    daemon = start_daemon(drain=600.0)
    daemon.chat("echo a")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(daemon.chat, "slow 100000")
        wait_until(lambda: daemon.loaded()["test/echo"]["cache_used"] == 1)
        daemon.process.send_signal(signal.SIGINT)
        wait_until(lambda: httpx.get(f"{daemon.url}/health").json()["status"] == "stopping")
        daemon.process.send_signal(signal.SIGINT)
        assert answer.result().status_code == 503
    assert daemon.process.wait(100) == 0


def test_killed_daemon_ends_its_workers(start_daemon: Start) -> None:
    daemon = start_daemon()
    daemon.chat("echo a")
    pid = daemon.loaded()["test/echo"]["pid"]
    daemon.process.kill()
    daemon.process.wait()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() if Path("/proc").exists() else True)
    assert (daemon.folder / "run" / "daemon.pid").exists()  # the next start replaces it
    after = start_daemon(daemon.folder)
    assert after.chat("echo a").status_code == 200


@pytest.mark.parametrize(
    ("settings", "keyed"), [({}, False), ({"host": "0.0.0.0"}, True), ({"host": "0.0.0.0", "api_key": "mine"}, False)]
)
def test_server_setup_and_shutdown_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], keyed: bool
) -> None:
    """The daemon with a fake server. It is announced when the server listens, and it ends after the loaded models."""
    steps: list[Any] = []
    made: dict[str, Any] = {}

    class FakeServer:
        should_exit = False

        def __init__(self, config: Any, on_started: Callable[[], None]) -> None:
            made["config"], self.started = config, on_started

        async def serve(self, sockets: list[socket.socket]) -> None:
            made["families"] = [one.family for one in sockets]
            assert owner_pid() == 0
            self.started()
            while not self.should_exit:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            steps.append("served")

    class FakeModels:
        def __init__(self, settings: Settings, command: Any) -> None:
            made["command"] = command

        async def drain(self, seconds: float) -> None:
            steps.append(seconds)

        async def close(self) -> None:
            steps.append("closed")

    def build(host: FakeModels, address: Any) -> Any:
        made["address"] = address

    def ready(announcement: lifecycle.Announcement) -> None:
        made["said"] = announcement
        assert owner_pid() == os.getpid()
        assert f":{(folder / 'run' / 'daemon.port').read_text().strip()}" in announcement.url
        made["address"].stop()

    monkeypatch.setattr(lifecycle, "_Server", FakeServer)
    monkeypatch.setattr(lifecycle, "LoadedModels", FakeModels)
    monkeypatch.setattr(lifecycle, "build", build)
    lifecycle.run(Settings(port=0, developer=Developer(drain=0.5), **settings), ready, worker_command=("x",))  # type: ignore[arg-type]
    assert steps == [0.5, "closed", "served"]
    assert made["families"] == [socket.AF_INET, socket.AF_UNIX]
    assert made["command"] == ("x",)
    address, said = made["address"], made["said"]
    assert (address.url, address.names) == (said.url, (settings.get("host", "127.0.0.1"),))
    key_file = str(paths.api_key_file()) if keyed else ""
    assert (bool(address.key), said.key_file) == ("host" in settings, key_file)
    assert str(said).endswith(f"; clients need the API key in {key_file}" if keyed else said.url)
    config = made["config"]
    server_options = {
        "http": Connection,
        "ws": "none",
        "lifespan": "off",
        "access_log": False,
        "proxy_headers": False,  # any client could send another address
        "server_header": False,
        "log_config": None,
        "backlog": 512,
        "h11_max_incomplete_event_size": MAX_HEAD,
        "timeout_keep_alive": 75,
        "timeout_graceful_shutdown": 2,
    }
    assert {name: getattr(config, name) for name in server_options} == server_options
    assert list((folder / "run").iterdir()) == []
    assert owner_pid() is None


def test_failed_start_reports_the_last_lines_of_output(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(script: str) -> str:
        monkeypatch.setattr(background, "COMMAND", (sys.executable, "-c", script))
        with pytest.raises(DaemonUnreachable) as caught:
            background.start(Settings())
        return caught.value.message

    assert refused("print('\\n'.join(map(str, range(9))))") == "the daemon exited during its start: 4\n5\n6\n7\n8"
    assert refused("import sys; print('out'); print('err', file=sys.stderr)").count("\n") == 1
    assert refused("") == "the daemon exited during its start"


def test_background_start_raises_the_error_of_the_daemon(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import os, sys; fd = int(sys.argv[2]); sys.stdin.read();"
        'os.write(fd, b\'{"code":"port_taken","message":"m","hint":"h","numbers":{"port":7}}\')'
    )
    monkeypatch.setattr(background, "COMMAND", (sys.executable, "-c", script))
    with pytest.raises(PortTaken) as caught:
        background.start(Settings())
    assert (caught.value.message, caught.value.hint, caught.value.numbers) == ("m", "h", {"port": 7})


def test_owner_that_loses_the_race_releases_its_locks(folder: Path) -> None:
    """The first owner removes the file while the second waits for the lock; the second must create a new file."""
    first = Owner()
    first.release()
    second = Owner()
    with pytest.raises(PortTaken) as caught:
        Owner()
    assert caught.value.hint == "localllm stop stops it"
    second.release()
    assert not (folder / "run" / "daemon.pid").exists()
    (folder / "run" / "daemon.pid").write_text("no number")
    with (folder / "run" / "daemon.pid").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert owner_pid() == 0
    (folder / "run" / "daemon.pid").unlink()


def test_second_daemon_is_refused(start_daemon: Start) -> None:
    first = start_daemon()
    second = start_daemon(first.folder)
    assert second.said.startswith("port_taken")
    assert str(first.pid) in second.said
    assert second.process.wait(100) == 9
    assert first.chat("echo a").status_code == 200
    assert int((first.folder / "run" / "daemon.pid").read_text()) == first.pid


def test_port_in_use_error_names_the_process(start_daemon: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused = start_daemon(port=port)
        assert refused.said.startswith(f"port_taken: port {port} on 127.0.0.1 is in use")
        assert f"(pid {os.getpid()})" in refused.said
        assert "--port" in refused.said
        assert refused.process.wait(100) == 9
        assert not list((refused.folder / "run").iterdir())


def test_ipv6_loopback_needs_no_key(start_daemon: Start) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    daemon = start_daemon(host="::1")
    assert daemon.url.startswith("http://[::1]:")
    assert httpx.get(f"{daemon.url}/v1/models").status_code == 200


def test_owner_writes_pid_and_port(folder: Path) -> None:
    assert owner_pid() is None
    owner = Owner()
    owner.publish(7)
    try:
        assert owner_pid() == os.getpid()
        with pytest.raises(PortTaken, match=str(os.getpid())):
            Owner()
        assert (folder / "run" / "daemon.port").read_text() == "7\n"
    finally:
        owner.release()
    assert owner_pid() is None
    (folder / "run" / "daemon.pid").write_text("1\n")  # process 1 exists, but has no lock
    assert owner_pid() is None
    Owner().release()


def test_owner_pid_does_not_block_a_start(folder: Path) -> None:
    Owner().release()
    file = folder / "run" / "daemon.pid"
    file.touch()
    with file.open() as asking, ThreadPoolExecutor(1) as pool:
        fcntl.flock(asking, fcntl.LOCK_SH)  # owner_pid holds this lock for an instant
        starting = pool.submit(Owner)
        time.sleep(0.05)
        asking.close()
        starting.result().release()


def test_one_of_many_processes_becomes_the_owner(folder: Path) -> None:
    code = (
        "import os\n"
        "from localllm.app.daemon.owner import Owner\n"
        "from localllm.app.errors import PortTaken\n"
        "won = 0\n"
        "for _ in range(100):\n"
        "    try: owner = Owner()\n"
        "    except PortTaken: continue\n"
        "    mark = open('held', 'x'); mark.close()\n"
        "    os.unlink('held'); won += 1\n"
        "    owner.release()\n"
        "print(won)\n"
    )
    racing = [
        subprocess.Popen([sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    said = [process.communicate(timeout=100) for process in racing]
    assert [process.returncode for process in racing] == [0] * 4, said
    assert sum(int(out) for out, _ in said) > 0


def test_background_start(folder: Path) -> None:
    background.start(Settings(port=0))
    pid = owner_pid()
    assert pid
    assert os.getsid(pid) != os.getsid(0)
    with pytest.raises(PortTaken, match=f"already running .pid {pid}"):
        background.start(Settings(port=0))
    port = int((folder / "run" / "daemon.port").read_text())
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: owner_pid() is None)
    assert "is listening at" in (folder / "state" / "localllm" / "log" / "daemon.log").read_text()


def test_failed_background_start_reports_the_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.invalid"):
        background.start(Settings(host="nowhere.invalid"))
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(PortTaken, match="is in use"):
        background.start(Settings(port=other.getsockname()[1]))
    monkeypatch.setattr(background, "COMMAND", (sys.executable, "-c", "raise SystemExit('no room in the inn')"))
    with pytest.raises(DaemonUnreachable, match="no room in the inn"):
        background.start(Settings())
    monkeypatch.setattr(background, "COMMAND", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(background, "START_SECONDS", 0.2)
    with pytest.raises(DaemonUnreachable, match="did not start"):
        background.start(Settings())


def test_runtime_folder_that_others_can_enter_is_refused(
    start_daemon: Start, short_folder: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = short_folder()
    (folder / "run").mkdir(mode=0o755)
    refused = start_daemon(folder)
    assert refused.said.startswith("storage_failed")
    assert "0700" in refused.said
    monkeypatch.setenv("LOCALLLM_RUNTIME_DIR", str(folder / "run"))
    with pytest.raises(StorageFailed, match="0700"):
        owner_pid()


def test_socket_path_that_is_too_long_is_refused(start_daemon: Start, folder: Path) -> None:
    refused = start_daemon(folder, env={"LOCALLLM_RUNTIME_DIR": str(folder / ("x" * 120))})
    assert refused.said.startswith("storage_failed")
    assert "LOCALLLM_RUNTIME_DIR" in refused.said


def test_daemon_imports_no_tensor_library() -> None:
    code = (
        "import sys, localllm.app.daemon.__main__, localllm.app.client, localllm.app.daemon.background\n"
        "print([name for name in ('torch', 'numpy', 'transformers', 'textual') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == "[]"
