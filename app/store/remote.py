"""The files of one revision of a repository on a hub: names, sizes, hashes and addresses.

Three sources: Hugging Face (`hf`), ModelScope (`ms`) and one file of another host (`url`).
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from ..errors import InvalidRequest

Source = Literal["hf", "ms", "url"]

MAIN = "main"
# Names that a snapshot folder cannot store: separators and control characters, and the device names of Windows.
UNSAFE_CHARACTERS = re.compile(r'[\\\x00-\x1f\x7f<>:"|?*]')
DEVICE_NAME = re.compile(r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³])(\..*)?", re.IGNORECASE)
MAX_SEGMENT_BYTES = 255


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository. Without a hash, only its size can be verified."""

    name: str  # path in the repository, with /
    size: int  # bytes
    sha256: str | None = None  # of the content; files in Git LFS have it
    git_oid: str | None = None  # SHA-1 of the git blob; files outside Git LFS have it
    url: str = ""
    mirrors: tuple[str, ...] = ()  # other addresses of the same file, in order of preference
    etag: str = ""  # of the reply at `url`; only for a file without a hash

    @property
    def key(self) -> str:
        """The name of the blob in the cache: the file's hash, which is its ETag in huggingface_hub.

        The key of a file without a hash depends on its address, size and ETag, and has another length than a hash.
        """
        return self.sha256 or self.git_oid or self._address_hash

    @property
    def has_hash(self) -> bool:
        """False: nothing vouches for the bytes of the file."""
        return bool(self.sha256 or self.git_oid)

    @property
    def _address_hash(self) -> str:
        identity = f"{self.url}\n{self.size}\n{self.etag}"
        return hashlib.sha256(identity.encode(errors="surrogatepass")).hexdigest()[:48]


@dataclass(frozen=True, slots=True)
class Repository:
    """The files of one revision of a repository."""

    name: str  # org/repo; the address of the file for source url
    commit: str
    files: tuple[RemoteFile, ...]
    folder: Path  # the folder of the repository in the shared cache
    source: Source = "hf"
    revision: str = MAIN  # the branch, tag or commit that was requested
    licence: str = ""  # as the hub names it; empty: unknown

    @property
    def id(self) -> str:
        """The name of the repository, as a user types it."""
        return f"ms:{self.name}" if self.source == "ms" else self.name

    @property
    def snapshot(self) -> Path:
        """The folder of the links to this revision's files."""
        return self.folder / "snapshots" / self.commit


def check_names(repository: str, names: Iterable[str]) -> None:
    """Refuse file names that would leave the snapshot folder, or that not every file system can store.

    Raises InvalidRequest for such a name, for two names that differ only in case or in Unicode form, and for a name
    that is also the folder of another.
    """
    folded: dict[str, str] = {}
    for name in names:
        if not is_safe(name):
            raise _unsafe(repository, f"a file with an unsafe name: {name[:200]!r}")
        other = folded.setdefault(_folded(name), name)
        if other != name:
            raise _unsafe(repository, f"two files with the same name: {other[:200]!r} and {name[:200]!r}")
    for name in folded.values():
        for folder in PurePosixPath(name).parents:
            if _folded(str(folder)) in folded:
                raise _unsafe(repository, f"a file with the name of a folder: {str(folder)[:200]!r}")


def _unsafe(repository: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{repository[:200]} has {problem}", hint="localllm does not download such a repository")


def _folded(name: str) -> str:
    """The name as a file system compares it that ignores case and Unicode form."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def is_safe(name: str) -> bool:
    """True for a relative path of ordinary names: no `..`, no device name, no control character, no \\."""
    try:
        segments = [segment.encode("utf-8") for segment in name.split("/")]
    except UnicodeEncodeError:  # a surrogate
        return False
    if UNSAFE_CHARACTERS.search(name) or len(name) > 1000:
        return False
    for segment, encoded in zip(name.split("/"), segments, strict=True):
        if not _is_ordinary(segment) or len(encoded) > MAX_SEGMENT_BYTES:
            return False
    return True


def _is_ordinary(segment: str) -> bool:
    if segment in {"", ".", ".."} or segment.endswith((" ", ".")):
        return False
    return DEVICE_NAME.fullmatch(segment) is None
