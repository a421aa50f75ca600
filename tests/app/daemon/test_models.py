"""The workers of a real daemon: loaded once, watched, cancelled, unloaded, replaced."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from localllm.app import paths
from localllm.app.daemon import loading, process
from localllm.app.daemon.loading import CHECK
from localllm.app.errors import NoBackend
from localllm.app.frames import Load
from localllm.app.store import resolved

from ...waiting import wait_until
from .conftest import Daemon, deaths, events, snapshot, until


def load(daemon: Daemon, model: str, **more: Any) -> list[Any]:
    with daemon.local() as client:
        return events(client.post("/admin/load", json={"model": model} | more, timeout=100).text)


def unload(daemon: Daemon, model: str) -> int:
    with daemon.local() as client:
        return client.post("/admin/unload", json={"model": model}, timeout=100).status_code


def worker_pids(daemon: Daemon) -> list[int]:
    return [child.pid for child in psutil.Process(daemon.pid).children(recursive=True)]


def test_concurrent_requests_share_one_load(daemon: Daemon) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: daemon.chat("echo a", model="test/slow"), range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    worker_log = (daemon.folder / "state" / "localllm" / "log" / "worker-test--slow.log").read_text()
    assert worker_log.count("loading test/slow") == 1
    assert unload(daemon, "test/slow") == 200


def test_load_reports_progress(daemon: Daemon) -> None:
    *progress, model = load(daemon, "test/slow")
    assert [step["done"] for step in progress] == [0, 0.25, 0.5, 0.75]
    assert progress[0]["stage"] == "reading weights"
    assert (model["id"], model["state"], model["memory"]) == ("test/slow", "ready", 1024)
    assert load(daemon, "test/slow")[0]["pid"] == model["pid"]  # a loaded model is not loaded again
    assert unload(daemon, "test/slow") == 200
    assert "test/slow" not in daemon.loaded()
    assert unload(daemon, "test/slow") == 404


def test_log_has_the_backend_and_the_reason(daemon: Daemon) -> None:
    load(daemon, "test/echo")
    wait_until(lambda: "loaded test/echo on cpu (fake): it is a test" in daemon.log)


def test_load_reports_warnings(daemon: Daemon) -> None:
    assert load(daemon, "test/other")[-1]["warnings"] == ["no memory for this"]
    assert load(daemon, "test/echo")[-1]["warnings"] == []
    unload(daemon, "test/other")


def test_request_for_another_backend_reloads(daemon: Daemon) -> None:
    first = load(daemon, "test/other")[-1]
    second = load(daemon, "test/other", backend="cuda")[-1]
    assert (first["backend"], second["backend"]) == ("cpu", "cuda")
    assert first["pid"] != second["pid"]
    assert load(daemon, "test/other", backend="auto")[-1]["pid"] == second["pid"]
    unload(daemon, "test/other")


def test_unusable_backend_does_not_unload_the_model(daemon: Daemon) -> None:
    first = load(daemon, "test/other")[-1]
    error = load(daemon, "test/other", backend="npu")[-1]["error"]
    assert (error["code"], error["message"]) == ("backend_unavailable", "backend npu cannot be used")
    assert load(daemon, "test/other")[-1]["pid"] == first["pid"]
    unload(daemon, "test/other")


@pytest.mark.parametrize(
    ("backend", "code"), [("cpu", ""), ("npu", "backend_unavailable"), ("cpv", "backend_unavailable")]
)
def test_backend_is_probed_in_a_child_process(backend: str, code: str) -> None:
    done = subprocess.run([*CHECK, backend, "guide", str(paths.guide_dir())], capture_output=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, b"")
    said = json.loads(done.stdout or b"{}")
    assert said.get("code", "") == code
    assert not code or backend in said["message"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import time; time.sleep(60)", "no result within 1 s"),
        ("import os; os.abort()", "status -6"),
        ("import os; assert 'LOCALLLM_API_KEY' not in os.environ", ""),
    ],
)
def test_probe_that_hangs_or_crashes_is_an_error(monkeypatch: pytest.MonkeyPatch, script: str, message: str) -> None:
    monkeypatch.setenv("LOCALLLM_API_KEY", "secret")
    monkeypatch.setattr(loading, "CHECK", (sys.executable, "-c", script))
    monkeypatch.setattr(loading, "CHECK_SECONDS", 1.0)
    probe = loading.check_backend("hip", resolved.model("guide"))
    if not message:
        asyncio.run(probe)
        return
    with pytest.raises(NoBackend, match=f"cannot probe backend hip: .*{message}"):
        asyncio.run(probe)


def test_loaded_model_reports_its_load_options(daemon: Daemon) -> None:
    assert load(daemon, "test/other")[-1]["options"] == []
    load(daemon, "test/other", quant="int8", backend="cuda")
    assert load(daemon, "test/other")[-1]["options"] == ["--backend cuda", "--quant int8"]
    assert daemon.chat("echo a", model="test/other").json()["system_fingerprint"].endswith("-cuda-float32-int8")
    unload(daemon, "test/other")


def test_request_for_another_quant_reloads(daemon: Daemon) -> None:
    first = load(daemon, "test/other")[-1]
    second = load(daemon, "test/other", quant="int8")[-1]
    assert (first["quant"], second["quant"]) == ("", "int8")
    assert first["pid"] != second["pid"]
    assert load(daemon, "test/other")[-1]["pid"] == second["pid"], "no requested quant: no reload"
    assert load(daemon, "test/other", quant="none")[-1]["quant"] == ""
    with daemon.local() as client:
        answer = client.post("/admin/load", json={"model": "test/other", "quant": "int3"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "quant")
    unload(daemon, "test/other")


@pytest.mark.parametrize(
    ("requested", "description"), [({"backend": "cuda"}, "on cpu"), ({"quant": "int8"}, "with quant none")]
)
def test_busy_model_is_not_reloaded(daemon: Daemon, requested: dict[str, str], description: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer, end = until(pool, daemon, model="test/other")
        try:
            wait_until(lambda: daemon.loaded().get("test/other", {}).get("cache_used") == 1)
            error = load(daemon, "test/other", **requested)[-1]["error"]
        finally:
            end()
        assert answer.result().status_code == 200, "the running answer was not interrupted"
    assert error["message"] == f"test/other is busy {description}"
    assert error["param"] in requested
    unload(daemon, "test/other")


@pytest.mark.parametrize(("model", "status", "code"), [("broken", 422, "model_unusable"), ("dies", 500, "worker_died")])
def test_failed_load_reports_the_error(daemon: Daemon, model: str, status: int, code: str) -> None:
    before = set(worker_pids(daemon))
    answer = daemon.chat("echo a", model=f"test/{model}", stream=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert load(daemon, f"test/{model}")[-1]["error"]["code"] == code
    assert f"test/{model}" not in daemon.loaded()
    wait_until(lambda: set(worker_pids(daemon)) <= before)


@pytest.mark.parametrize("stream", [False, True])
def test_killed_worker_is_replaced(daemon: Daemon, stream: bool) -> None:
    daemon.chat("echo a")
    pid = daemon.loaded()["test/echo"]["pid"]
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(daemon.chat, "slow 100000", stream=stream) for _ in range(4)]
        wait_until(lambda: daemon.loaded()["test/echo"]["cache_used"] == 4)
        os.kill(pid, signal.SIGKILL)
        answers = [answer.result() for answer in waiting]
    for answer in answers:
        assert answer.status_code == (200 if stream else 500)
        error = events(answer.text)[-1]["error"] if stream else answer.json()["error"]
        assert error["code"] == "worker_died"
        assert "x-should-retry" not in answer.headers
    assert daemon.chat("echo a").status_code == 200
    assert daemon.loaded()["test/echo"]["pid"] != pid
    assert deaths(daemon) >= 1
    wait_until(lambda: f"worker of test/echo (pid {pid}) ended: SIGKILL" in daemon.log)


def test_worker_that_crashes_during_a_request_is_replaced(daemon: Daemon) -> None:
    answer = daemon.chat("crash", stream=True)
    *_, piece, error = events(answer.text)
    assert piece["choices"][0]["delta"]["content"] == "one "
    assert error["error"]["code"] == "worker_died"
    assert daemon.chat("echo a").status_code == 200


def test_worker_that_breaks_the_protocol_is_replaced(daemon: Daemon) -> None:
    answer = daemon.chat("garbage")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "worker_died")
    assert "broke the protocol" in daemon.log
    assert daemon.chat("echo a").status_code == 200


def test_hanging_worker_does_not_delay_other_models(daemon: Daemon) -> None:
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(daemon.chat, "hang", model="test/stubborn")
        wait_until(lambda: daemon.loaded().get("test/stubborn", {}).get("requests") == 1)
        assert daemon.chat("echo a").status_code == 200
        pid = daemon.loaded()["test/stubborn"]["pid"]
        assert unload(daemon, "test/stubborn") == 200  # this worker ignores Shutdown and is killed
        answer = hanging.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_stopping")
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("stream", [False, True])
def test_worker_with_an_endless_step_is_replaced(start_daemon: Callable[..., Daemon], stream: bool) -> None:
    daemon = start_daemon(step_timeout=1.0)
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(daemon.chat, "slow 100000")
        wait_until(lambda: daemon.loaded().get("test/echo", {}).get("cache_used") == 1)
        pid = daemon.loaded()["test/echo"]["pid"]
        stalled = daemon.chat("stall", stream=stream)
        answers = [(stalled, stream), (other.result(), False)]
    for answer, streamed in answers:
        assert answer.status_code == (200 if streamed else 500)
        error = events(answer.text)[-1]["error"] if streamed else answer.json()["error"]
        assert (error["code"], "a step took more than 1 s" in error["message"]) == ("worker_died", True)
    assert daemon.chat("echo a").status_code == 200
    assert not psutil.pid_exists(pid)
    assert deaths(daemon) == 1
    assert "hangs" in daemon.log


def test_worker_that_does_not_respond_is_replaced(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(env={"TEST_WATCH_SECONDS": "0.1", "TEST_ANSWER_SECONDS": "5"})
    error = events(daemon.chat("freeze 3600", stream=True).text)[-1]["error"]
    assert (error["code"], "it did not respond" in error["message"]) == ("worker_died", True)
    assert daemon.chat("echo a").status_code == 200
    assert deaths(daemon) == 1


PATIENCE = {"TEST_LOAD_SECONDS": "5", "TEST_WATCH_SECONDS": "0.1"}


def test_worker_with_an_endless_load_is_replaced(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(env=PATIENCE)
    wait = snapshot(daemon, "slow") / "wait"
    wait.touch()
    with ThreadPoolExecutor(2) as pool:
        hanging = pool.submit(daemon.chat, "echo a", model="test/slow")
        wait_until(lambda: daemon.loaded().get("test/slow", {}).get("pid"))
        pid = daemon.loaded()["test/slow"]["pid"]
        other = pool.submit(daemon.chat, "echo a")
        answer = hanging.result()
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (500, "worker_died")
        assert "hung: reading weights took more than 5 s" in error["message"]
        assert other.result().status_code == 200, "the second load only waited for the first"
    assert not psutil.pid_exists(pid)
    wait.unlink()
    assert daemon.chat("echo a", model="test/slow").status_code == 200


@pytest.mark.parametrize("says", ["telling", "long"])
def test_announced_long_load_is_not_killed(start_daemon: Callable[..., Daemon], says: str) -> None:
    daemon = start_daemon(env=PATIENCE)
    wait = snapshot(daemon, "slow") / "wait"
    wait.write_text(says)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(daemon.chat, "echo a", model="test/slow")
        time.sleep(8.0)
        assert not asking.done()
        wait.unlink()
        assert asking.result().status_code == 200


async def test_load_is_checked_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After a suspend, the limit is exceeded before the daemon reads the frames that arrived."""
    monkeypatch.setattr(process, "LOAD_SECONDS", 0.02)
    ended: list[process.WorkerProcess] = []
    worker = process.WorkerProcess(Load(model="some/model", path="/"), log_dir=tmp_path, on_over=ended.append)
    loaded = asyncio.get_running_loop().create_future()
    watching = asyncio.create_task(worker._watch_load(loaded))
    for _ in range(4):
        await asyncio.sleep(0.1)
        worker._progressed.set()
    watching.cancel()
    assert not loaded.done()
    assert ended == []


def test_slow_worker_is_not_killed(start_daemon: Callable[..., Daemon]) -> None:
    """A long step of a backend without a limit, and a worker that fails one check."""
    daemon = start_daemon(env={"TEST_WATCH_SECONDS": "0.05", "TEST_ANSWER_SECONDS": "3"})
    assert daemon.chat("freeze 4").status_code == 200
    with ThreadPoolExecutor(1) as pool:
        stalled = pool.submit(daemon.chat, "stall")
        wait_until(lambda: daemon.loaded()["test/echo"]["cache_used"] == 1)
        time.sleep(0.5)  # ten checks
        assert not stalled.done()
        assert unload(daemon, "test/echo") == 200
        assert stalled.result().json()["error"]["code"] == "server_stopping"
    assert deaths(daemon) == 0


def test_next_worker_waits_for_the_end_of_the_previous_process(daemon: Daemon) -> None:
    """The previous process may use device memory until its end."""
    daemon.chat("echo a")
    pid = daemon.loaded()["test/echo"]["pid"]
    assert daemon.chat("linger").json()["error"]["code"] == "worker_died"
    assert psutil.pid_exists(pid)
    assert daemon.chat("echo a").status_code == 200
    assert not psutil.pid_exists(pid)


def test_stream_sends_keep_alives(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(env={"TEST_KEEP_ALIVE_SECONDS": "0.1"})
    body = {"model": "test/echo", "messages": [{"role": "user", "content": "hang"}], "stream": True}
    with httpx.stream("POST", f"{daemon.url}/v1/chat/completions", json=body, timeout=100) as response:
        lines = response.iter_lines()
        heard = [next(lines) for _ in range(6)]
    assert heard[0].startswith("data: ")
    assert heard[2] == heard[4] == ": keep-alive"


def test_idle_model_is_unloaded_and_busy_model_is_not(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(idle_unload=0.3)
    with ThreadPoolExecutor(1) as pool:
        running, end = until(pool, daemon)
        wait_until(lambda: daemon.loaded().get("test/echo", {}).get("cache_used") == 1)
        assert daemon.loaded()["test/echo"]["unload_in"] is None
        time.sleep(0.6)
        assert daemon.loaded()["test/echo"]["requests"] == 1
        end()
        assert running.result().status_code == 200
    wait_until(lambda: not daemon.loaded() and not worker_pids(daemon))
    assert daemon.chat("echo a").status_code == 200


def test_loaded_model_reports_the_time_to_its_unload(daemon: Daemon) -> None:
    daemon.chat("echo a")
    assert 0 < daemon.loaded()["test/echo"]["unload_in"] <= 900


def test_full_queue_is_429_with_retry_after(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(max_queue=2)
    daemon.chat("echo a")
    never = daemon.chat("echo a", n=3)  # a retry would fail again
    assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
    with ThreadPoolExecutor(2) as pool:
        (first, end), (second, _) = until(pool, daemon), until(pool, daemon)
        wait_until(lambda: daemon.loaded()["test/echo"]["requests"] == 2)
        refused = daemon.chat("echo a", stream=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "server_overloaded")
        assert refused.headers["retry-after"] == "1"
        end()
        assert [first.result().status_code, second.result().status_code] == [200, 200]
    assert daemon.chat("echo a").status_code == 200


def test_only_a_client_on_the_socket_may_name_a_folder(daemon: Daemon) -> None:
    folder = snapshot(daemon, "echo")
    assert load(daemon, str(folder))[-1]["id"] == str(folder)
    assert daemon.chat("echo a", model=str(folder)).status_code == 404  # not even while the folder is loaded
    with daemon.local() as client:
        body = {"model": str(folder), "messages": [{"role": "user", "content": "echo a"}]}
        assert client.post("/v1/chat/completions", json=body).json()["model"] == str(folder)
    assert unload(daemon, str(folder)) == 200


def test_worker_environment_has_no_api_key(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(env={"LOCALLLM_API_KEY": "secret"})
    daemon.chat("echo a")
    (pid,) = worker_pids(daemon)
    assert "LOCALLLM_API_KEY" not in psutil.Process(pid).environ()


def test_ctrl_c_does_not_reach_the_worker(daemon: Daemon) -> None:
    daemon.chat("echo a")
    pid = daemon.loaded()["test/echo"]["pid"]
    assert os.getpgid(pid) == pid != os.getpgid(daemon.pid)


def test_unload_during_a_load(daemon: Daemon) -> None:
    with ThreadPoolExecutor(1) as pool:
        wait = snapshot(daemon, "slow") / "wait"
        wait.touch()
        asking = pool.submit(daemon.chat, "echo a", model="test/slow")
        wait_until(lambda: "test/slow" in daemon.loaded())
        assert daemon.loaded()["test/slow"]["state"] == "loading"
        assert unload(daemon, "test/slow") == 200
        answer = asking.result()
        wait.unlink()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_stopping")
    assert "test/slow" not in daemon.loaded()
    assert daemon.chat("echo a", model="test/slow").status_code == 200
    assert unload(daemon, "test/slow") == 200


def test_answer_longer_than_the_drain_of_an_unload_gets_an_error(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(drain=0.2)
    daemon.chat("echo a")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(daemon.chat, "slow 100000", stream=True)
        wait_until(lambda: daemon.loaded()["test/echo"]["cache_used"] == 1)
        assert unload(daemon, "test/echo") == 200
        assert "test/echo was unloaded" in running.result().text


def test_request_during_an_unload_loads_the_model_again(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(drain=30.0)
    daemon.chat("echo a")
    pid = daemon.loaded()["test/echo"]["pid"]
    with ThreadPoolExecutor(3) as pool:
        running, end = until(pool, daemon)
        wait_until(lambda: daemon.loaded()["test/echo"]["requests"] == 1)
        leaving = pool.submit(unload, daemon, "test/echo")
        wait_until(lambda: "unloading test/echo" in daemon.log)
        coming = pool.submit(daemon.chat, "echo a")
        time.sleep(0.1)
        assert not coming.done()
        end()
        assert (coming.result().status_code, leaving.result()) == (200, 200)
        assert running.result().status_code == 200  # the answer ended within the drain
    assert f"(pid {pid}) ended" not in daemon.log, "the log has an error only for an unexpected end"
    assert daemon.loaded()["test/echo"]["pid"] != pid


def test_log_of_a_worker_has_a_limited_size(daemon: Daemon) -> None:
    assert daemon.chat("noise").status_code == 200
    logs = daemon.folder / "state" / "localllm" / "log"
    newest = logs / "worker-test--echo.log"
    wait_until(lambda: newest.read_text().endswith(f"049999 {'x' * 92}\n"))
    text = (logs / "worker-test--echo.log.1").read_text() + newest.read_text()
    numbers = re.findall(r"^(\d{6}) x{92}$", text, re.MULTILINE)
    assert [int(number) for number in numbers] == [*range(50_000 - len(numbers), 50_000)], "the lines are unchanged"
    assert len(numbers) > 2**20 / 100
    assert sum(file.stat().st_size for file in logs.glob("worker-test--echo.log*")) < 2 * 2**20 + 2**17


def test_many_crashes_leave_no_processes_or_files(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    process = psutil.Process(daemon.pid)

    def crashes(count: int) -> tuple[int, int]:
        """Crash the worker `count` times; returns the daemon's open files and memory."""
        for _ in range(count):
            assert daemon.chat("crash").json()["error"]["code"] == "worker_died"
        wait_until(lambda: not process.children(recursive=True))
        return process.num_fds(), process.memory_info().rss

    files, memory = crashes(5)
    files_then, memory_then = crashes(20)
    assert deaths(daemon) == 25
    assert files_then <= files
    assert memory_then < memory + 2**21
    assert daemon.chat("echo a").status_code == 200


def test_many_requests_leave_no_tasks_or_files(daemon: Daemon) -> None:
    process = psutil.Process(daemon.pid)

    def burst() -> None:
        with ThreadPoolExecutor(8) as pool:
            kinds = ["echo a b", "refuse", "think", "call", "loud 5", "fail"]
            list(pool.map(lambda i: daemon.chat(kinds[i % 6], stream=i % 2 == 0), range(240)))
        for _ in range(10):
            with daemon.http.stream(
                "POST",
                f"{daemon.url}/v1/chat/completions",
                json={"model": "test/echo", "messages": [{"role": "user", "content": "slow 1000"}], "stream": True},
            ) as response:
                next(response.iter_raw())

    burst()
    wait_until(lambda: daemon.loaded()["test/echo"]["requests"] == 0)
    files, memory = process.num_fds(), process.memory_info().rss
    burst()
    wait_until(lambda: daemon.loaded()["test/echo"]["requests"] == 0)
    wait_until(lambda: process.num_fds() <= files + 2)
    assert process.memory_info().rss < memory + 8 * 2**20
    assert daemon.loaded()["test/echo"]["cache_used"] == 0
