"""Compares the files of a model with their hashes: the name of a blob is the SHA-256 of the file or its git hash."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from ...errors import StorageFailed
from ..records import FileVerdict, Verification
from .blobs import UNVERIFIED, blob_of, is_unverified
from .refs import ModelRef

BLOCK = 2**20  # bytes
HASHES = {"sha256": re.compile(r"[0-9a-f]{64}"), "git": re.compile(r"[0-9a-f]{40}")}
WRONG = ("damaged", "missing")

Progress = Callable[[str, int, int], None]  # name of the file, bytes of all files read, and in total


def verify(ref: ModelRef, progress: Progress = lambda *_: None) -> Verification:
    """Compare every file of a model with its hash. Raises StorageFailed if a file cannot be read."""
    files = ref.files
    total = sum(path.stat().st_size for _, path in files if path.is_file())
    done = 0
    verdicts = []

    def add(count: int) -> None:
        nonlocal done
        done += count
        progress(name, done, total)

    try:
        for name, path in files:
            add(0)
            verdicts.append(verify_file(name, path, add))
    except OSError as error:
        raise StorageFailed(f"cannot read the files of {ref.id}: {error}") from error
    problems = [f"{verdict.file} is {verdict.status}" for verdict in verdicts if verdict.status in WRONG]
    return Verification(id=ref.id, ok=not problems, problems=problems, files=verdicts)


def verify_file(name: str, path: Path, progress: Callable[[int], None] = lambda _: None) -> FileVerdict:
    """The verdict on one file of a snapshot. `path`: a link to a blob, or a file without a hash."""
    expected, blob = expected_hash(path)
    if not path.is_file():
        return FileVerdict(name, "missing", 0, expected)
    size = blob.stat().st_size
    if not expected:
        return FileVerdict(name, "unknown", size)
    digest = hashlib.sha1(b"blob %d\0" % size) if expected.startswith("git:") else hashlib.sha256()
    with blob.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            progress(len(block))
    if expected.partition(":")[2] != digest.hexdigest():
        return FileVerdict(name, "damaged", size, expected)
    return FileVerdict(name, "unknown" if is_unverified(blob) else "ok", size, expected)


def expected_hash(path: Path) -> tuple[str, Path]:
    """The hash in the name of a file's blob, and the blob. The hash is empty if the name has none.

    It is `sha256:…`, `git:…`, or `unverified:` and the SHA-256 of what arrived: no hub has named a hash.
    """
    blob = blob_of(path)
    if blob is None:
        return "", path
    if is_unverified(blob):
        return f"unverified:{blob.name.removeprefix(UNVERIFIED)}", blob
    kinds = [kind for kind, pattern in HASHES.items() if pattern.fullmatch(blob.name)]
    return (f"{kinds[0]}:{blob.name}" if kinds else ""), blob
