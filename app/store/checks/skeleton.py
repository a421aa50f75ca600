"""Skeletons of remote models: folders that look like a downloaded model, but have no weights.

    config.json, files beside tokenizer.json, templates, README.md    as at the hub
    *.safetensors, *.gguf                                            the header as at the hub, then a hole
    all other files                                                  a hole

A hole needs no disk space. A file that is on this machine already is a link. So the code that inspects and measures a
model is the same before and after a download.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from ....engine.files.config_files import CONFIG_FILES
from ....engine.files.generation_config import GENERATION
from ....engine.files.model_files import MODULES
from ....engine.files.pooling import PROMPTS, SENTENCES
from ....engine.files.weight_files import INDEXES
from ...errors import ModelUnusable
from ..remote import RemoteFile
from .headers import read_gguf, safetensors_head

# Files that are fetched completely; each is smaller than its limit in engine.files.model_files.
COMPLETE = (
    *CONFIG_FILES,
    GENERATION,
    *INDEXES,
    "adapter_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    MODULES,
    "*_Pooling/config.json",
    SENTENCES,
    PROMPTS,
    "README.md",
)
MAX_COMPLETE = 32 * 2**20  # bytes of one file
MAX_FETCHED = 512 * 2**20  # bytes of all files together
FIRST_BYTES = 256 * 2**10  # bytes of the first request of a weight file: most headers are shorter
THREADS = 8

# Fetches `length` bytes of a file from an offset. Raises an AppError.
Fetch = Callable[[RemoteFile, int, int], bytes]


class RemoteHead:
    """A headers.Reader of the beginning of a remote file. Each byte is fetched once."""

    def __init__(self, file: RemoteFile, fetch: Fetch) -> None:
        self.head = b""
        self._file = file
        self._fetch = fetch

    @property
    def name(self) -> str:
        return PurePosixPath(self._file.name).name

    @property
    def size(self) -> int:
        return self._file.size

    def read(self, offset: int, length: int) -> bytes:
        stop = min(offset + length, self.size)
        if stop > len(self.head):
            start = len(self.head)
            self.head += self._fetch(self._file, start, min(max(stop, FIRST_BYTES), self.size) - start)
        return self.head[offset:stop]


@contextmanager
def skeleton(
    files: Sequence[RemoteFile], fetch: Fetch, stored: Mapping[str, Path] = MappingProxyType({})
) -> Iterator[Path]:
    """A temporary folder with the skeleton of a repository. `files`: the selected files, with safe names.

    `stored`: name → path of the files that are on this machine.

    Raises ModelRefused for a malformed header, ModelUnusable for files that are too large, or an error of `fetch`.
    """
    with tempfile.TemporaryDirectory(prefix="localllm-inspect-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        budget = _Budget(fetch)
        missing = [file for file in files if file.name not in stored]
        pool = ThreadPoolExecutor(THREADS)
        try:
            for _ in pool.map(lambda file: _write(folder / file.name, file, budget.fetch), missing):
                pass
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after an error or Ctrl-C, `ranges` ends the requests
        for name, path in stored.items():
            link = folder / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.absolute())
        yield folder


class _Budget:
    """Limits the bytes that a Fetch returns in total."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._left = MAX_FETCHED

    def fetch(self, file: RemoteFile, offset: int, length: int) -> bytes:
        self._left -= length  # two threads may exceed the limit by one request each
        if self._left < 0:
            raise ModelUnusable(f"the headers of this model have more than {MAX_FETCHED} bytes")
        return self._fetch(file, offset, length)


def _write(path: Path, file: RemoteFile, fetch: Fetch) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = _content(file, fetch)
    with path.open("wb") as stream:
        stream.write(content)
        stream.truncate(file.size)


def _content(file: RemoteFile, fetch: Fetch) -> bytes:
    """The bytes at the beginning of a file that the skeleton has."""
    suffix = PurePosixPath(file.name).suffix.lower()
    if suffix == ".safetensors":
        return safetensors_head(RemoteHead(file, fetch))
    if suffix == ".gguf":
        reader = RemoteHead(file, fetch)
        header = read_gguf(reader)
        return reader.head[: header.num_bytes]
    if not any(fnmatch(file.name, pattern) for pattern in COMPLETE):
        return b""
    if file.size > MAX_COMPLETE:
        raise ModelUnusable(f"{file.name} has {file.size} bytes; the limit is {MAX_COMPLETE}")
    return fetch(file, 0, file.size) if file.size else b""
