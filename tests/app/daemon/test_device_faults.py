"""Real workers with a device fault during four answers: typed errors, a daemon that continues, a new worker."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from localllm.backends import cuda
from localllm.engine.runner import DeviceInfo

from ...waiting import wait_until
from ..tiny_qwen import write_model
from .conftest import Daemon, deaths, events, snapshot

WORKER = (sys.executable, str(Path(__file__).parent / "faulty_worker.py"))
GPU = pytest.mark.skipif(not isinstance(cuda.probe(), DeviceInfo), reason="no NVIDIA GPU")


@dataclass(frozen=True)
class Place:
    """A backend, and its limit for one step in seconds."""

    backend: str
    model: str
    step_timeout: float


@pytest.fixture(params=[Place("cpu", "test/tiny", 1.5), pytest.param(Place("cuda", "guide", 6.0), marks=GPU)])
def place(request: pytest.FixtureRequest) -> Place:
    return request.param


@dataclass
class Breaking:
    """A daemon whose worker has a fault on demand."""

    daemon: Daemon
    fault: Path
    model: str

    def ask(self, words: str, **more: Any) -> httpx.Response:
        asked = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | more
        return self.daemon.chat(words, model=self.model, **asked)

    def answer_to(self, words: str) -> str:
        answer = self.ask(words)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]

    @property
    def pid(self) -> int:
        return self.daemon.loaded()[self.model]["pid"]

    def break_under_four(self, kind: str) -> list[dict[str, Any]]:
        """The errors of two streams and two documents."""
        aside = self.fault.with_name("aside")
        aside.write_text(kind)
        aside.rename(self.fault)
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(self.ask, f"{n} times", stream=n % 2 == 0, max_tokens=1500) for n in range(4)]
            answers = [answer.result() for answer in asked]
        assert [answer.status_code for answer in answers[::2]] == [200, 200], "the streams have begun"
        errors = [events(answer.text)[-1]["error"] for answer in answers[::2]]
        for answer in answers[1::2]:
            errors.append(answer.json()["error"] | {"status": answer.status_code})
        return errors


@pytest.fixture
def breaking(
    place: Place, start_daemon: Callable[..., Daemon], short_folder: Callable[[], Path]
) -> Callable[..., Breaking]:
    def start(*, patience: float = 30.0, **settings: Any) -> Breaking:
        """`patience`: seconds after which a worker without a reply counts as hung."""
        folder = short_folder()
        env = {
            "TEST_WORKER": json.dumps(WORKER),
            "TEST_FAULT": str(folder / "fault"),
            "TEST_WATCH_SECONDS": "0.2",
            "TEST_ANSWER_SECONDS": str(patience),
        }
        if place.backend == "cuda":  # all tests share the compiled kernels and their self-test
            kept = Path(tempfile.gettempdir()) / f"localllm-kernels-{os.getuid()}"
            env |= {"TRITON_CACHE_DIR": str(kept / "triton"), "XDG_CACHE_HOME": str(kept)}
        daemon = start_daemon(folder, env=env, backend=place.backend, cache_mib=64, max_rows=8, **settings)
        if place.backend == "cpu":
            write_model(snapshot(daemon, "tiny"), context=2048)
            (snapshot(daemon, "tiny").parents[1] / "refs").mkdir()
            (snapshot(daemon, "tiny").parents[1] / "refs" / "main").write_text("0123456789abcdef")
        return Breaking(daemon, folder / "fault", place.model)

    return start


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("broken", "an illegal memory access was encountered"),
        ("assertion", ""),
        ("endless", "a step took more than"),
        ("frozen", "it did not respond for"),
        ("crashed", "ended unexpectedly"),
        ("killed", "ended unexpectedly"),
    ],
)
def test_broken_device_ends_its_requests_and_its_worker(
    breaking: Callable[..., Breaking], place: Place, kind: str, text: str
) -> None:
    if place.backend == "cpu" and kind in ("assertion", "crashed", "killed"):
        pytest.skip("the same as broken, or as what fake workers do")
    run = breaking(
        step_timeout=place.step_timeout if kind == "endless" else 0.0, patience=5.0 if kind == "frozen" else 30.0
    )
    before, pid = run.answer_to("hello"), run.pid
    errors = run.break_under_four(kind)
    assert {error["code"] for error in errors} == {"worker_died"}
    assert all(text in error["message"] for error in errors), errors
    assert {error.get("status", 500) for error in errors} == {500}
    assert run.answer_to("hello") == before
    assert run.pid != pid
    assert deaths(run.daemon) == 1
    assert httpx.get(f"{run.daemon.url}/health").json()["status"] == "ok"


def test_step_out_of_memory_ends_only_its_requests(breaking: Callable[..., Breaking]) -> None:
    run = breaking()
    before, pid = run.answer_to("hello"), run.pid
    for _ in range(3):  # a step without a fault resets the count of faults
        errors = run.break_under_four("no_memory")
        assert {error["code"] for error in errors} == {"out_of_memory"}
        assert {error.get("status", 503) for error in errors} == {503}
        assert all("memory" in error["message"] and error["hint"] for error in errors)
        assert run.answer_to("hello") == before
    assert run.pid == pid
    assert deaths(run.daemon) == 0


def test_many_crashes_leave_no_processes_or_files(breaking: Callable[..., Breaking], place: Place) -> None:
    """Twenty crashes, five at a time: the free GPU memory and the size of the daemon stay."""
    if place.backend == "cpu":
        pytest.skip("about a GPU's memory")
    began = free()

    def crash(run: Breaking) -> list[int]:
        daemon_process = []
        for kind in ("broken", "killed", "assertion", "crashed"):
            run.answer_to("hello")
            run.break_under_four(kind)
            daemon_process.append(psutil.Process(run.daemon.pid).memory_info().rss)
        return daemon_process

    runs = [breaking() for _ in range(5)]
    with ThreadPoolExecutor(5) as pool:
        grown = [daemon_process[-1] - daemon_process[0] for daemon_process in pool.map(crash, runs)]
    assert [deaths(run.daemon) for run in runs] == [4] * 5
    wait_until(lambda: free() >= began - 2**22)
    print(f"\nGPU: {began >> 20} MiB free before, {free() >> 20} after; daemons grew by {max(grown) >> 10} KiB at most")
    assert max(grown) < 2**23


def free() -> int:
    """Free memory of the GPU in bytes."""
    free_bytes = cuda.probe()
    assert isinstance(free_bytes, DeviceInfo)
    return free_bytes.free
