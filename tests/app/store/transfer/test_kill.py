"""SIGKILL at random moments of a download: nothing visible is wrong, and little is downloaded twice."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.app.store.remote import RemoteFile
from localllm.app.store.transfer.leftovers import partials

from ...hub import LFS, Hub, git_oid, model_files, serving
from .transfer_child import arrived_file

CHUNK = 16 * 1024
CONNECTIONS = 4
POLICY = {
    "chunk_bytes": CHUNK,
    "request_bytes": 2 * CHUNK,
    "connections": CONNECTIONS,
    "first_connections": 2,
    "first_wait": 0.001,
    "sync_interval": 0.005,
    "tick": 0.01,
}
FILES = model_files(24 * CHUNK, shards=2)
BYTES = sum(map(len, FILES.values()))
ROOT = Path(__file__).parents[4]


def remote_files(hub: Hub, files: dict[str, bytes]) -> list[RemoteFile]:
    """The files of org/a, as the hub describes them."""
    remote = []
    for name, data in files.items():
        sha256 = hub.sha256(data) if name.endswith(LFS) else None
        url = f"{hub.url}/org/a/resolve/main/{name}"
        remote.append(RemoteFile(name, len(data), sha256, None if sha256 else git_oid(data), url))
    return remote


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serving(Hub({"org/a": FILES})) as hub:
        yield hub


class Children:
    """The process that forks downloads."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.app.store.transfer.transfer_child"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        files = [dataclasses.asdict(file) for file in remote_files(hub, FILES)]
        self._write(json.dumps({"files": files, "folder": str(folder), "policy": POLICY}))

    def kill_after(self, microseconds: int) -> bool:
        """Start a download and kill it. Returns True if it was complete before."""
        self._write(str(microseconds))
        assert self._process.stdout is not None
        reply = self._process.stdout.readline().strip()
        assert reply in ("killed", "complete")
        return reply == "complete"

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(100)
        self._process.stdout.close()


def check_visible(folder: Path) -> None:
    """Every visible blob is right, and a snapshot has all files."""
    contents = set(FILES.values())
    for blob in (folder / "blobs").glob("*"):
        if ".localllm." not in blob.name:
            assert blob.read_bytes() in contents
    for snapshot in (folder / "snapshots").glob("*"):
        assert {file.name: file.read_bytes() for file in snapshot.iterdir()} == FILES
    if (folder / "refs" / "main").exists():
        assert (folder / "snapshots" / (folder / "refs" / "main").read_text()).is_dir()


def complete_bytes(folder: Path) -> int:
    """Bytes that the next download must not request again."""
    blobs = [blob for blob in (folder / "blobs").glob("*") if ".localllm." not in blob.name]
    return sum(blob.stat().st_size for blob in blobs) + sum(leftover.received for leftover in partials(folder))


@pytest.mark.parametrize("kills", [110, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_killed_downloads_lose_at_most_one_chunk_of_each_connection(kills: int, hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "models--org--a"
    children = Children(hub, folder)
    numbers = random.Random(kills)
    count = completed = 0
    longest = 60_000  # microseconds; follows the time that a complete download takes
    try:
        while count < kills:
            before = complete_bytes(folder)
            if children.kill_after(numbers.randrange(longest)):
                completed += 1
                longest = max(2000, int(longest * 0.8))
                assert len(list((folder / "snapshots").iterdir())) == 1
                assert int(arrived_file(folder).read_text()) <= BYTES - before
            else:
                count += 1
                longest = min(1_000_000, int(longest * 1.05) + 100)
                assert complete_bytes(folder) >= before
            check_visible(folder)
            if completed and (folder / "snapshots").exists():
                shutil.rmtree(folder)
                completed = 0
        while not children.kill_after(1_000_000):
            pass
        check_visible(folder)
        assert partials(folder) == []
        assert (folder / "refs" / "main").read_text() == "c" * 40
    finally:
        children.close()
