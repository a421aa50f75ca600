"""The results of tests by machine, in tests/results.jsonl. `pytest --record-tiers` writes this file.

`python -m scripts.results FILE…` merges files from other machines into it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "results.jsonl"
SOURCE_ENDS = frozenset({".py", ".h", ".cpp", ".cu", ".cuh"})
_TORCH = ("engine", "backends/pytorch", "kernels/ops", "kernels/compiled")
# Backend -> the folders whose code its tests run. A record counts for these sources only.
SOURCES: Mapping[str, tuple[str, ...]] = {
    "cpu": (*_TORCH, "backends/cpu", "kernels/cpu"),
    "cuda": (*_TORCH, "backends/cuda", "kernels/cuda", "kernels/gpu", "kernels/triton"),
    "hip": (*_TORCH, "backends/hip", "kernels/gpu", "kernels/triton"),
    "npu": (*_TORCH, "backends/npu"),
    "xpu": (*_TORCH, "backends/xpu", "kernels/triton"),
    "mlx": ("engine", "backends/mlx"),
    "llamacpp": ("engine", "backends/llamacpp"),
}


@cache
def sources_of(backend: str) -> str:
    """A hash of the sources that the tests of a backend run."""
    files = [file for folder in SOURCES.get(backend, ()) for file in (ROOT / folder).rglob("*")]
    digest = hashlib.sha256()
    for file in sorted(files):
        if file.suffix in SOURCE_ENDS:
            content = file.read_bytes()
            digest.update(f"{file.relative_to(ROOT).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Record:
    """Outcomes of the tests of one backend in a test file: either of the conformance suite, or of the other tests."""

    backend: str
    tier: str  # a marker of pyproject.toml
    lane: str  # the implementation of the ops, e.g. "library" or "triton"; empty: the backend has only one
    machine: str  # name of the device
    file: str
    suite: bool  # True: tests of the conformance suite; False: the other tests of the file
    passed: int
    failed: int
    skipped: int
    date: str  # YYYY-MM-DD, UTC
    commit: str
    sources: str = ""  # sources_of the backend when the tests ran

    @property
    def is_current(self) -> bool:
        """Whether the sources are those of the tests. Otherwise the record is of an earlier version."""
        return self.sources == sources_of(self.backend)

    @property
    def run(self) -> tuple[str, str, str, str]:
        """The key of a test run. A new run replaces all records with its key."""
        return self.file, self.backend, self.machine, self.lane


def read(file: Path = RESULTS) -> list[Record]:
    """The records of a file; empty if the file is missing. Raises TypeError or ValueError for a malformed line."""
    if not file.exists():
        return []
    return [Record(**json.loads(line)) for line in file.read_text("utf-8").splitlines()]


def merge(records: Iterable[Record], file: Path = RESULTS) -> None:
    """Write records into the file. They replace the records of earlier runs with the same key.

    A run that skipped every test, for example because a library is not built, does not replace a run that did not.
    """
    new = list(records)
    old = read(file)
    replaced = {record.run for record in new} - (_executed(old) - _executed(new))
    merged = [record for record in old if record.run not in replaced]
    merged += [record for record in new if record.run in replaced]
    lines = sorted(json.dumps(asdict(record)) for record in merged)
    file.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def _executed(records: Iterable[Record]) -> set[tuple[str, str, str, str]]:
    return {record.run for record in records if record.passed or record.failed}


def main() -> int:
    for name in sys.argv[1:]:
        merge(read(Path(name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
