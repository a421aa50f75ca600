"""Every write of a download fails once, and the power is cut at random moments."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.app.errors import AppError
from localllm.app.store.remote import RemoteFile, Repository
from localllm.app.store.transfer import partial
from localllm.app.store.transfer.disk import Disk
from localllm.app.store.transfer.leftovers import partials
from localllm.app.store.transfer.partial import DATA_SUFFIX
from localllm.app.store.transfer.policy import Policy

from ...disk_changes import look_before_changes
from ...failing_disks import CountingDisk, PowerCutDisk, failing_disk
from ...hub import Hub, serving
from .test_kill import BYTES, CHUNK, FILES, POLICY, check_visible, complete_bytes, remote_files
from .transfer_child import download

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)
SINGLE = Policy(**{**POLICY, "connections": 1, "first_connections": 1, "headroom": 0})


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serving(Hub({"org/a": FILES})) as hub:
        yield hub


def repository(hub: Hub, folder: Path) -> Repository:
    return Repository("org/a", "c" * 40, tuple(remote_files(hub, FILES)), folder)


@pytest.mark.parametrize("codes", [1, pytest.param(len(ERRORS), marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_every_call_that_fails_leaves_a_store_that_a_second_pull_completes(
    codes: int, hub: Hub, tmp_path: Path
) -> None:
    """In the normal suite each call fails with one of the errors; in the slow suite with each of them."""
    counting = CountingDisk()
    download(repository(hub, tmp_path / "first"), SINGLE, counting)
    assert counting.count > 60
    failed = 0
    for position in range(counting.count):
        for code in (ERRORS * 2)[position % len(ERRORS) :][:codes]:
            folder = tmp_path / f"models--{position}-{code}"
            try:
                download(repository(hub, folder), SINGLE, failing_disk(position, code))
            except OSError as error:
                assert error.errno == code  # noqa: PT017 - a later call may not be reached
                failed += 1
            check_visible(folder)
            download(repository(hub, folder), SINGLE, Disk())
            check_visible(folder)
            assert (folder / "refs" / "main").read_text() == "c" * 40
            assert partials(folder) == []
    assert failed >= 0.9 * counting.count * codes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/fd")
@pytest.mark.parametrize("cuts", [60, pytest.param(400, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_power_cut_leaves_a_store_that_a_second_pull_completes(
    cuts: int, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes that were not synced are lost at random, also halves of writes and the last renames.

    Small files are synced one by one or together.
    """
    numbers = random.Random(cuts)
    counting = CountingDisk()
    download(repository(hub, tmp_path / "first"), Policy(**POLICY), counting)
    for number in range(cuts):
        folder = tmp_path / f"models--{number}"
        saved = tmp_path / f"saved{number}"
        saved.mkdir()
        monkeypatch.setattr(partial, "MAX_SINGLE_SYNCS", 16 * (number % 2))
        for _ in range(1 + number % 2):  # a second cut hits the continued download
            disk = PowerCutDisk(numbers.randrange(counting.count), saved)
            with contextlib.suppress(OSError, AppError):
                download(repository(hub, folder), Policy(**POLICY), disk)
            disk.cut(numbers)
            check_visible(folder)
        download(repository(hub, folder), Policy(**POLICY), Disk())
        check_visible(folder)
        assert (folder / "refs" / "main").read_text() == "c" * 40


def test_snapshot_appears_with_all_its_files(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models--a"
    snapshots: list[int] = []

    def look() -> None:
        check_visible(folder)
        snapshots.append(len(list((folder / "snapshots").glob("*"))))

    look_before_changes(monkeypatch, look)
    download(repository(hub, folder), Policy(**POLICY), Disk())
    look()
    assert len(snapshots) > 10
    assert snapshots[-1] == 1


class MeetingDisk(Disk):
    """The first two reads wait for each other."""

    def __init__(self) -> None:
        self._both = threading.Barrier(2)
        self._reads = itertools.count()

    def read_into(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        if next(self._reads) < 2:
            self._both.wait(100)
        return super().read_into(descriptor, buffer, offset)


def test_files_are_hashed_at_the_same_time(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "models--a"
    download(repository(hub, folder), Policy(**POLICY), MeetingDisk())
    check_visible(folder)


class BlockedDisk(Disk):
    """Hashers wait until `unblocked` is set."""

    def __init__(self) -> None:
        self.unblocked = threading.Event()

    def read_into(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        assert self.unblocked.wait(100)
        return super().read_into(descriptor, buffer, offset)


def test_requests_wait_for_a_hash_that_is_far_behind(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "models--a"
    disk = BlockedDisk()
    policy = Policy(**{**POLICY, "unhashed_bytes": 4 * CHUNK})
    thread = threading.Thread(target=download, args=(repository(hub, folder), policy, disk))
    thread.start()
    before = -1
    while before != hub.sent or complete_bytes(folder) <= 4 * CHUNK:
        before = hub.sent
        time.sleep(0.2)
    received = complete_bytes(folder)
    disk.unblocked.set()
    thread.join()
    assert 4 * CHUNK < received < 20 * CHUNK < BYTES
    check_visible(folder)


class SlowDisk(Disk):
    """The periodic sync of received data ends when a file is complete."""

    def __init__(self) -> None:
        self.complete = threading.Event()
        self.waited = False

    def sync(self, descriptor: int) -> None:
        is_periodic = threading.current_thread().name == "sync" and os.fstat(descriptor).st_size > CHUNK
        if is_periodic and not self.waited:
            self.waited = True
            assert self.complete.wait(100)
        super().sync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        if source.name.endswith(DATA_SUFFIX) and target.stat().st_size > CHUNK:
            self.complete.set()


class BrokenDisk(Disk):
    """Reads fail as no disk does."""

    def read_into(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        raise LookupError("a defect")


def test_defect_in_a_thread_ends_the_download(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="a defect"):
        download(repository(hub, tmp_path / "models--a"), Policy(**POLICY), BrokenDisk())


def test_sync_does_not_delay_the_hash(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "models--a"
    disk = SlowDisk()
    hub.speed = 2_000_000
    try:
        download(repository(hub, folder), Policy(**POLICY), disk)
    finally:
        hub.speed = 0
    assert disk.waited
    check_visible(folder)


@pytest.mark.parametrize("mebibytes", [5, 28, 300, 10_000])
def test_interruption_loses_a_small_share_of_a_file(mebibytes: int, tmp_path: Path) -> None:
    """Each connection loses at most its chunk."""
    size = mebibytes * 2**20
    file = RemoteFile("model.safetensors", size, "a" * 64, None, "http://127.0.0.1/")
    policy = Policy()
    (tmp_path / "blobs").mkdir()
    job = partial.PartialFile(Disk(), tmp_path / "blobs", file, policy)
    try:
        assert job.chunks.chunk_bytes * policy.connections <= max(4 * 2**20, size // 8)
    finally:
        job.close()
