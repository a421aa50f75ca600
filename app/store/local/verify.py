"""Compares the files of a model with their hashes: the name of a blob is the SHA-256 of the file or its git hash."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import ggufs
from .blobs import UNVERIFIED, blob_of, is_unverified
from .cache import ModelRef

Status = Literal["ok", "damaged", "missing", "unknown"]
BLOCK = 2**20  # bytes
SHA256 = re.compile(r"[0-9a-f]{64}")
GIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one file. `unknown`: no hub has named a hash, so nothing vouches for the bytes of the file."""

    file: str
    status: Status
    size: int
    hash: str = ""  # the expected hash: `sha256:…`, `git:…`, or `unverified:` and the SHA-256 of what arrived


def verify(model: ModelRef, progress: Callable[[int], None] = lambda _: None) -> Iterator[Verdict]:
    """Hash every file of a model and yield a verdict on each. `progress` gets the number of bytes of each read."""
    for name, path in files_of(model):
        yield verify_file(name, path, progress)


def files_of(model: ModelRef) -> list[tuple[str, Path]]:
    """The name and the path of every file of a model, without the files that localllm derives from them.

    A GGUF model has its own files; other models in its folder do not count.
    """
    if ggufs.is_gguf(model.path):
        return _files_of_gguf(model.path)
    files = []
    for path in sorted(model.path.rglob("*")):
        name = str(path.relative_to(model.path))
        if not path.is_dir() and not name.startswith(".localllm"):
            files.append((name, path))
    return files


def _files_of_gguf(path: Path) -> list[tuple[str, Path]]:
    """The shards of a GGUF model; in the cache, also the texts that were downloaded with them."""
    root = ggufs.root_of(path)
    files = [file.path for file in ggufs.model_of(path).files]
    if root.parent.name == "snapshots":
        files += [file for file in root.glob("*") if not ggufs.is_gguf(file) and not file.is_dir()]
    return sorted((str(file.relative_to(root)), file) for file in files)


def verify_file(name: str, path: Path, progress: Callable[[int], None] = lambda _: None) -> Verdict:
    """The verdict on one file of a snapshot. `path`: a link to a blob, or a file without a hash."""
    expected, blob = expected_hash(path)
    if not path.is_file():
        return Verdict(name, "missing", 0, expected)
    size = blob.stat().st_size
    if not expected:
        return Verdict(name, "unknown", size)
    digest = hashlib.sha1(b"blob %d\0" % size) if expected.startswith("git:") else hashlib.sha256()
    with blob.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            progress(len(block))
    intact: Status = "unknown" if is_unverified(blob) else "ok"
    status: Status = intact if expected.partition(":")[2] == digest.hexdigest() else "damaged"
    return Verdict(name, status, size, expected)


def expected_hash(path: Path) -> tuple[str, Path]:
    """The hash in the name of a file's blob, and the blob. The hash is empty if the name has none."""
    blob = blob_of(path)
    if blob is None:
        return "", path
    if is_unverified(blob):
        return f"unverified:{blob.name.removeprefix(UNVERIFIED)}", blob
    if SHA256.fullmatch(blob.name):
        return f"sha256:{blob.name}", blob
    if GIT.fullmatch(blob.name):
        return f"git:{blob.name}", blob
    return "", blob
