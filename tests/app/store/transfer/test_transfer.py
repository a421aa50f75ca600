"""Transfers without faults: layout of the cache, tokens, mirrors, pause, cancel, limits, two processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest

from localllm.app import paths
from localllm.app.errors import DownloadFailed
from localllm.app.store.pull.download import Download
from localllm.app.store.transfer import transfer
from localllm.app.store.transfer.chunks import Chunks, Lease
from localllm.app.store.transfer.disk import Disk
from localllm.app.store.transfer.journal import Journal, Record, read_record
from localllm.app.store.transfer.leftovers import partials
from localllm.app.store.transfer.limiter import Limiter
from localllm.app.store.transfer.policy import Policy
from localllm.app.store.transfer.progress import Progress
from localllm.app.store.transfer.transfer import Cancelled
from localllm.app.store.transfer.worklist import WorkList

from ....waiting import HANG_SECONDS, wait_until
from ...hub import Hub, commit_of, serving
from ...hub_faults import inject
from .test_faults import CHUNK, FILES, check_store, use
from .test_faults import POLICY as FAULT_POLICY
from .test_faults import pull as pull_with

NESTED = {**FILES, "additional_chat_templates/tool_use.jinja": b"{{ tools }}", "empty.txt": b""}
BYTES = sum(map(len, FILES.values()))
# No transfer here has a fault: only a hang exceeds these times.
POLICY = replace(FAULT_POLICY, stall_timeout=100.0, connect_timeout=100.0, lookup_timeout=100.0)


def pull(name: str = "org/a", policy: Policy = POLICY) -> Path:
    return pull_with(name, policy)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub({"org/a": FILES, "org/nested": NESTED})) as hub:
        use(hub, monkeypatch)
        yield hub


def folder(name: str = "org--a") -> Path:
    return paths.hub_cache_dir() / f"models--{name}"


def test_huggingface_hub_finds_what_we_pulled(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = pull("org/nested")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    cache = paths.hub_cache_dir()
    found = huggingface_hub.snapshot_download("org/nested", cache_dir=cache, local_files_only=True)
    assert Path(found) == snapshot
    for name, data in NESTED.items():
        file = huggingface_hub.hf_hub_download("org/nested", name, cache_dir=cache, local_files_only=True)
        assert Path(file).read_bytes() == data
    scan = huggingface_hub.scan_cache_dir(cache)
    assert [repo.repo_id for repo in scan.repos] == ["org/nested"]
    assert not scan.warnings


def test_we_find_what_huggingface_hub_pulled(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub has downloaded one file. We download the others and do not request that file again."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # CI sets it
    cache = paths.hub_cache_dir()
    api = {"cache_dir": cache, "endpoint": hub.url}
    huggingface_hub.hf_hub_download("org/a", "model.safetensors", **api)
    before = len(hub.log)
    pull()
    assert not [path for _, path in hub.log[before:] if path.endswith("model.safetensors")]
    check_store()


def test_token_is_sent_to_its_server_only(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.token = "secret"
    pull()
    assert hub.leaked == []
    assert "/content/org/a/model.safetensors" in {path for _, path in hub.log}


def test_mirror_gets_no_token_and_takes_over(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first address of HF_ENDPOINT fails from the middle of a file on."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    mirror_files = Hub({"org/a": FILES}, redirects=False)
    with serving(mirror_files) as mirror:
        use(hub, monkeypatch, f"{hub.url},{mirror.url}/")
        inject(hub, "status 500", "middle", 10**6)
        pull()
        check_store()
        assert mirror.sent > 0
        hub.fails_with = 500
        download = Download("org/a", policy=POLICY)
        assert download.plan().missing == ()


def test_wrong_content_of_a_mirror_is_replaced_by_the_next(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(hub, "bit flip", "middle", 10**6)
    with serving(Hub({"org/a": FILES})) as mirror:
        use(hub, monkeypatch, f"{hub.url},{mirror.url}")
        pull()
    check_store()


@pytest.mark.parametrize("source", ["ms:org/a", "org/a"])
def test_second_pull_requests_no_file(source: str, hub: Hub) -> None:
    first = pull(source)
    before = len(hub.log)
    assert pull(source) == first
    assert not [path for _, path in hub.log[before:] if "/resolve/" in path]
    assert partials(first.parents[1]) == []


def test_branch_moves_when_its_new_files_are_complete(hub: Hub) -> None:
    hub.revisions["org/a"] = {"main": commit_of("old")}
    pull()
    hub.revisions["org/a"] = {"main": commit_of("new")}
    hub.repos["org/a"] = {**FILES, "README.md": b"new"}
    inject(hub, "status 404", "start", 10**6)
    with pytest.raises(DownloadFailed):
        pull()
    assert (folder() / "refs" / "main").read_text() == commit_of("old")
    assert [snapshot.name for snapshot in (folder() / "snapshots").iterdir()] == [commit_of("old")]
    hub.fault = None
    assert (pull() / "README.md").read_bytes() == b"new"
    assert (folder() / "refs" / "main").read_text() == commit_of("new")


class Running:
    """A download in a thread, and its progress."""

    def __init__(self) -> None:
        self.events: list[Progress] = []
        self.error: BaseException | None = None
        self.download = Download("org/a", policy=replace(POLICY, stall_timeout=3600.0), notify=self.events.append)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.download.run(self.download.plan())
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(HANG_SECONDS)
        assert not self._thread.is_alive()


def test_pause_stops_all_bytes_and_resume_continues(hub: Hub) -> None:
    hub.speed = 100_000
    running = Running()
    wait_until(lambda: hub.sent > 3 * CHUNK)
    running.download.pause()
    wait_until(lambda: running.events[-1].state == "paused")
    received = -1
    while received != running.events[-1].received:  # without the pause, until all bytes are here
        received = running.events[-1].received
        time.sleep(0.2)
    assert received < BYTES
    hub.speed = 0
    running.download.resume()
    running.join()
    assert running.error is None
    assert running.events[-1].received == running.events[-1].total
    check_store()


def test_cancel_ends_at_once_and_the_next_pull_continues(hub: Hub) -> None:
    hub.speed = 100_000
    running = Running()
    wait_until(lambda: sum(leftover.received for leftover in partials(folder())) >= 3 * CHUNK)
    hub.speed = 50  # bytes per second: without the cancel, the rest takes hours
    running.download.cancel()
    running.join()
    assert isinstance(running.error, Cancelled)
    received = sum(leftover.received for leftover in partials(folder()))
    hub.speed = 0
    again = Running()
    again.join()
    assert again.events[-1].arrived <= BYTES - received
    check_store()


def test_stalled_connection_does_not_delay_cancel(hub: Hub) -> None:
    hub.stalls_in = "model.safetensors"
    running = Running()
    assert hub.stalled.wait(HANG_SECONDS)
    running.download.cancel()
    running.join()
    assert isinstance(running.error, Cancelled)


def test_bandwidth_limit_holds(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection waits until its bytes have passed. The clock stands still, so that all bytes pass in turn."""
    waits: list[float] = []
    monkeypatch.setattr(transfer, "Limiter", lambda rate: Limiter(rate, lambda: 0.0))
    monkeypatch.setattr(WorkList, "sleep", lambda work, job, seconds: waits.append(seconds))
    pull(policy=replace(POLICY, bandwidth=400_000))
    assert max(waits) == pytest.approx(BYTES / 400_000, rel=0.01)


def test_limiter_spreads_bytes_over_time() -> None:
    now = [0.0]
    limiter = Limiter(1000, lambda: now[0])
    assert limiter.delay(500) == 0.5
    assert limiter.delay(500) == 1.0
    now[0] = 5.0
    assert limiter.delay(100) == pytest.approx(0.1)
    assert Limiter(0).delay(10**9) == 0


def test_two_processes_share_one_transfer(hub: Hub) -> None:
    """The second process waits and shows progress; when the first dies, it continues with the received data."""
    hub.speed = 30_000
    code = f"""
from localllm.app.store.pull.download import Download
from localllm.app.store.transfer.policy import Policy
download = Download("org/a", policy=Policy(chunk_bytes={CHUNK}, connections=4))
download.run(download.plan())
"""
    first = subprocess.Popen([sys.executable, "-c", code], env={**os.environ})
    try:
        wait_until(lambda: sum(leftover.received for leftover in partials(folder())) >= CHUNK)
        assert partials(folder())[0].active
        running = Running()
        wait_until(lambda: any(event.state == "waiting" for event in running.events))
        wait_until(lambda: running.events[-1].received > 2 * CHUNK)
        assert running.events[-1].state == "waiting"
    finally:
        first.kill()
        first.wait()
    received = sum(leftover.received for leftover in partials(folder()))
    hub.speed = 0
    running.join()
    assert running.error is None
    assert running.events[-1].arrived <= BYTES - received
    check_store()


def test_leftovers_of_huggingface_hub_are_listed(hub: Hub) -> None:
    blobs = folder() / "blobs"
    blobs.mkdir(parents=True)
    (blobs / ("a" * 64 + ".1234abcd.incomplete")).write_bytes(bytes(5000))
    leftover = partials(folder())[0]
    assert (leftover.resumable, leftover.active, leftover.received) == (False, False, 0)
    assert leftover.disk_bytes >= 5000
    pull()
    assert len(partials(folder())) == 1


def test_damaged_chunk_on_the_disk_is_downloaded_again_alone(hub: Hub) -> None:
    hub.speed = 200_000
    running = Running()
    wait_until(lambda: sum(leftover.received for leftover in partials(folder())) >= 4 * CHUNK)
    running.download.cancel()
    running.join()
    data, journal = partials(folder())[0].paths
    received = read_record(journal).received
    with data.open("r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 1]))
    hub.speed = 0
    again = Running()
    again.join()
    check_store()
    assert BYTES - received < again.events[-1].arrived <= BYTES - received + CHUNK


@pytest.mark.parametrize("damage", [b"", b"\0" * 300, b"garbage\n" * 9, b"localllm 1 other 1 1 00000000\n"])
def test_damaged_journal_is_replaced(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(damage)
    journal = Journal(Disk(), path, "key", 100, 10, "main")
    assert journal.claims == {}
    journal.claim(3, 0xABC)
    journal.close()
    with path.open("ab") as file:
        file.write(b"4 000")  # a torn line
    again = Journal(Disk(), path, "key", 100, 10, "main")
    again.claim(5, 1)
    again.close()
    assert read_record(path) == Record("key", 100, 20, "main")
    other = Journal(Disk(), path, "key", 101, 10, "main")
    other.close()
    assert other.claims == {}


def test_leases_of_the_last_file_become_shorter() -> None:
    chunks = Chunks(1000, 10, 30)
    lengths = []
    while not all(chunks.complete):
        lease = chunks.take(shares=4)
        assert lease is not None
        lengths.append(lease.end - lease.next)
        while lease.next < lease.end:
            chunks.finish(lease)
        chunks.give_back(lease)
    assert sum(lengths) == 100
    assert lengths[:3] == [25, 18, 14]
    assert lengths[-4:] == [1, 1, 1, 1]
    assert lengths == sorted(lengths, reverse=True)


def test_leases_cover_each_chunk_once() -> None:
    chunks = Chunks(95, 10, 3)
    first, second = chunks.take(), chunks.take()
    assert first is not None
    assert second is not None
    assert (first.next, first.end, second.next, second.end) == (0, 3, 3, 6)
    rest = [chunks.take(), chunks.take()]
    assert [(lease.next, lease.end) for lease in rest if lease] == [(6, 9), (9, 10)]
    stolen = chunks.take()
    assert stolen is not None
    assert (stolen.next, stolen.end) == (2, 3)
    assert first.end == 2
    assert chunks.length(9) == 5
    leases: list[Lease] = [first, second, stolen, *(lease for lease in rest if lease)]
    for lease in leases:
        while lease.next < lease.end:
            chunks.finish(lease)
        chunks.give_back(lease)
    assert all(chunks.complete)
    assert chunks.take() is None
    chunks.invalidate(4)
    again = chunks.take()
    assert again is not None
    assert (again.next, again.end) == (4, 5)
