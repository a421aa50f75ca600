"""`pytest --record-tiers`: counts the tests that pass by backend, tier and implementation, in tests/results.jsonl."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from localllm import backends
from localllm.engine.runner import DeviceInfo

from .accelerator import accelerator

ROOT = Path(__file__).resolve().parent.parent
COMMIT = "LOCALLLM_COMMIT"  # variable with the commit under test, for machines without git
TIERS = ("real", "real_otherdevice", "contract", "emulated", "compile")
# Words in the path of a test file -> backend of its tests.
BACKENDS = {**{name: name for name in backends.ORDER}, "amx": "cpu"}
GENERATED = (":!tests/results.jsonl", ":!README.md", ":!docs")

PROPERTY = "recorded"  # property of a report: the Key of its test; pytest-xdist sends it to the process that writes

Key = tuple[str, str, str, str, str, bool]  # the fields of Record before the counts


def tier_of(item: pytest.Item) -> str:
    """The tier of a test; empty: no claim about a device. A marker of the class overrides one of its base class."""
    tiers = [tier for tier in TIERS if item.get_closest_marker(tier)]
    return tiers[-1] if tiers else ""


@cache
def device(backend: str) -> DeviceInfo | None:
    info = backends.load(backend).probe()
    return info if isinstance(info, DeviceInfo) else None


def lane_of(backend: str) -> str:
    """The implementation of the backend's ops in this session; empty: the backend has only one."""
    info = device(backend)
    kernels = info.features.get("kernels", "") if info else ""
    if kernels.startswith("none"):
        return "triton" if info and info.features.get("Triton") == "yes" else "references"
    if not kernels:
        return ""
    return "library" if backend == "cuda" else kernels.partition(",")[0]


def backend_of(item: pytest.Item, words: list[str]) -> str:
    """The backend of a test: of its class, of its parameter `target`, or of the first word in the path that names one.

    Triton's tests are of the accelerator's backend. In the interpreter and without a target, they count for cuda."""
    if backend := suite_backend(item) or getattr(parameters_of(item).get("target"), "backend", ""):
        return str(backend)
    if "triton" in words:
        present = accelerator()
        return present.backend if present else "cuda"
    return next((BACKENDS[word] for word in words if word in BACKENDS), "")


def suite_backend(item: pytest.Item) -> str:
    """The backend of the class, which then is the conformance suite; empty for other tests."""
    return str(getattr(getattr(item, "cls", None), "backend", ""))


def parameters_of(item: pytest.Item) -> Mapping[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


def key_of(item: pytest.Item) -> Key | None:
    """The key of the counts of a test; None for a test without a backend.

    A GPU with the limits of gpu_limits counts as another device: it does not replace the results of the GPU itself."""
    tier = tier_of(item)
    file = item.path.relative_to(ROOT).as_posix()
    words = re.split(r"[/_.]", file)
    backend = backend_of(item, words)
    if not tier or not backend:
        return None
    parameters = parameters_of(item)
    lane = parameters.get("lane") or getattr(parameters.get("target"), "lane", "")
    if not lane or not isinstance(lane, str):
        lane = "triton" if "triton" in words else lane_of(backend)
    info = device(backend)
    limits = info.features.get("imitated GPU", "") if info else ""
    if tier == "real_otherdevice" and info and not info.second_choice:
        tier = "real"
    if tier == "real" and limits:
        tier = "real_otherdevice"
    host = device("cpu")
    machine = info if info and tier.startswith("real") else host
    name = machine.name if machine else "unknown"
    if limits and machine is info:
        name += f" (limited to {limits})"
    return backend, tier, lane, name, file, bool(suite_backend(item))


def commit() -> str:
    """The commit of the source; empty if it is unknown."""
    if name := os.environ.get(COMMIT):
        return name
    if shutil.which("git") is None:
        return ""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--", ".", *GENERATED)
    except subprocess.CalledProcessError:
        return ""
    return f"{head} with changes" if changed else head


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def in_worker() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ


class Recorder:
    """Writes the counts of a test file when all tests of the file have ended, since a session may be interrupted.

    With pytest-xdist the workers collect the tests, and only the controller writes, at the end of a complete session.
    """

    def __init__(self, file: Path, commit: str) -> None:
        self._file = file
        self._commit = commit
        self._keys: dict[str, Key] = {}
        self._left: Counter[str] = Counter()  # tests of a file that have not ended
        self._outcomes: dict[str, str] = {}
        self._unfinished: set[str] = set()  # tests that the workers of pytest-xdist collected and that have not ended

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        self._unfinished.update(ids)  # every worker collects all tests, and no test begins before

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if key := key_of(item):
                item.user_properties.append((PROPERTY, key))
                self._keys[item.nodeid] = key
                self._left[key[4]] += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == PROPERTY:
                self._keys[report.nodeid] = tuple(value)
        is_outcome = report.when == "call" or report.outcome != "passed"
        if is_outcome and report.nodeid in self._keys and self._outcomes.get(report.nodeid) != "failed":
            self._outcomes[report.nodeid] = report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._unfinished.discard(nodeid)
        if nodeid not in self._keys:
            return
        file = self._keys[nodeid][4]
        self._left[file] -= 1
        if self._left[file] == 0 and not in_worker():
            self._write(file)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        is_complete = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if is_complete and not in_worker():
            unfinished = {nodeid.partition("::")[0] for nodeid in self._unfinished}
            for file in {key[4] for key in self._keys.values()} - unfinished:
                if self._left[file] < 0:  # the tests were collected by the workers
                    self._write(file)

    def _write(self, file: str) -> None:
        from scripts.results import Record, merge, sources_of

        counts: defaultdict[Key, Counter[str]] = defaultdict(Counter)
        for nodeid, key in self._keys.items():
            if key[4] == file:
                counts[key][self._outcomes.get(nodeid, "failed")] += 1
        date = datetime.now(UTC).date().isoformat()
        merge(
            (
                Record(*key, count["passed"], count["failed"], count["skipped"], date, self._commit, sources_of(key[0]))
                for key, count in counts.items()
            ),
            self._file,
        )


def make_recorder(config: pytest.Config) -> Recorder:
    """Raises UsageError if the session would count a part of a file, or the commit is unknown."""
    if any("::" in name for name in config.args) or config.getoption("-k") or config.getoption("-m"):
        raise pytest.UsageError("--record-tiers counts complete test files: it excludes ::, -k and -m")
    source = commit()
    if not source:
        raise pytest.UsageError(f"--record-tiers needs the commit: set the variable {COMMIT}")
    if str(ROOT) not in sys.path:  # for the import of scripts.results
        sys.path.insert(0, str(ROOT))
    return Recorder(Path(config.getoption("--results")), source)
