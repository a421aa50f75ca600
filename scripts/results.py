"""tests/results.jsonl: which tests passed on which machine, as `pytest --record-tiers` wrote it there.

`python -m scripts.results FILE…` merges files that other machines wrote.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

KEPT = Path(__file__).resolve().parent.parent / "tests" / "results.jsonl"


@dataclass(frozen=True, slots=True)
class Record:
    """Outcomes of a test file's tests of one backend, or of the conformance suite in it."""

    backend: str
    tier: str  # a marker of pyproject.toml
    lane: str  # the implementation of the backend's ops, e.g. "library" or "triton"; empty: there is one
    machine: str  # the device's name
    file: str
    suite: bool  # the conformance suite's tests, not the others of the file
    passed: int
    failed: int
    skipped: int
    date: str  # YYYY-MM-DD, UTC
    commit: str

    @property
    def run(self) -> tuple[str, str, str, str]:
        """Equal for records that one run of a test file replaces together."""
        return self.file, self.backend, self.machine, self.lane


def read(file: Path = KEPT) -> list[Record]:
    """[] where there is no file. Raises TypeError or ValueError for a line that is not a record."""
    if not file.exists():
        return []
    return [Record(**json.loads(line)) for line in file.read_text("utf-8").splitlines()]


def merge(records: Iterable[Record], file: Path = KEPT) -> None:
    """Write them into the file, in place of what earlier runs of the same test files wrote. A run that skipped every
    test, such as those of a lane that was not built, replaces nothing."""
    new, old = list(records), read(file)
    replaced = {record.run for record in new} - (_ran(old) - _ran(new))
    left = [record for record in old if record.run not in replaced]
    lines = sorted(json.dumps(asdict(one)) for one in [*left, *(one for one in new if one.run in replaced)])
    file.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def _ran(records: Iterable[Record]) -> set[tuple[str, str, str, str]]:
    return {record.run for record in records if record.passed or record.failed}


def main() -> int:
    for name in sys.argv[1:]:
        merge(read(Path(name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
