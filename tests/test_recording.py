"""The counts of --record-tiers, and the claims of README from these counts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.engine.runner import DeviceInfo

from . import recording
from .accelerator import Accelerator
from .recording import ROOT, Recorder

sys.path.insert(0, str(ROOT))

from scripts.results import Record, merge, read, sources_of
from scripts.tables import rows_of

GPU = DeviceInfo("cuda", "NVIDIA A1", 2, 1, {"kernels": "/built/library.so", "Triton": "yes"})
BARE = DeviceInfo("cuda", "NVIDIA A1", 2, 1, {"kernels": "none, Triton computes", "Triton": "yes"})
LIMITED = replace(GPU, features={**GPU.features, "imitated GPU": "8.0 compute capability"})
RADEON = DeviceInfo("hip", "AMD R1", 2, 1, {"kernels": "none, Triton computes", "Triton": "yes"})
ARC = DeviceInfo("xpu", "Intel X1", 2, 1)
CPU = DeviceInfo("cpu", "A processor", 2, 1, {"kernels": "avx2, the best for this processor"})
OTHER = DeviceInfo("mlx", "MLX's CPU device", 2, 1, second_choice=True)
APPLE = DeviceInfo("mlx", "Apple M1", 2, 1)


TRITON = "tests/kernels/test_triton_linear.py"
OPS = "tests/kernels/test_ops.py"


@pytest.fixture(autouse=True)
def controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as the process that writes the results, also if this test runs in a worker of pytest-xdist."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


def item(name: str, *tiers: str, file: str = "tests/backends/test_cuda.py", backend: str = "", **params: Any) -> Any:
    cls = SimpleNamespace(backend=backend) if backend else None
    test_item = SimpleNamespace(nodeid=f"{file}::{name}", path=ROOT / file, cls=cls, user_properties=[])
    test_item.get_closest_marker = lambda tier: tier in tiers
    if params:
        test_item.callspec = SimpleNamespace(params=params)
    return test_item


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Simulate a machine with these devices."""
    result = {info.backend: info for info in request.param}
    monkeypatch.setattr(recording, "device", result.get)
    present = next((name for name in ("cuda", "hip", "xpu") if name in result), "")
    monkeypatch.setattr(recording, "accelerator", lambda: Accelerator(present, "") if present else None)


def report(of: Any, when: str, outcome: str) -> Any:
    return SimpleNamespace(nodeid=of.nodeid, when=when, outcome=outcome, user_properties=of.user_properties)


def record(file: Path, items: Sequence[Any], outcomes: dict[str, str]) -> list[Record]:
    """Record a session. `outcomes` has the outcome of the call of each test, or "phase outcome"."""
    recorder = Recorder(file, "abc1234")
    recorder.pytest_collection_modifyitems(list(items))
    for one in items:
        for text in outcomes.get(one.nodeid.partition("::")[2], "passed").split(", "):
            when, _, outcome = text.rpartition(" ")
            recorder.pytest_runtest_logreport(report(one, when or "call", outcome))
        recorder.pytest_runtest_logfinish(one.nodeid)
    return read(file)


@pytest.mark.parametrize("here", [[GPU, CPU]], indirect=True)
def test_outcomes_are_counted(here: None, tmp_path: Path) -> None:
    tests = [item(name, "real", backend="cuda") for name in "abcdef"] + [item("g", "real"), item("h")]
    outcomes = {"b": "skipped", "c": "failed", "d": "setup failed", "e": "passed, teardown failed", "f": "passed"}
    rest, suite = record(tmp_path / "results", tests, outcomes)
    assert (suite.suite, suite.passed, suite.failed, suite.skipped) == (True, 2, 3, 1)
    assert (rest.suite, rest.passed, rest.failed, rest.skipped) == (False, 1, 0, 0)
    assert (suite.backend, suite.tier, suite.lane, suite.machine) == ("cuda", "real", "library", "NVIDIA A1")
    assert (suite.file, suite.commit) == ("tests/backends/test_cuda.py", "abc1234")


@pytest.mark.parametrize(
    ("here", "tests", "keys"),
    [
        ([CPU], [item("a", "real", backend="cuda")], [("cuda", "real", "", "A processor")]),
        ([GPU, CPU], [item("a", "real", backend="cuda")], [("cuda", "real", "library", "NVIDIA A1")]),
        ([BARE, CPU], [item("a", "real", backend="cuda")], [("cuda", "real", "triton", "NVIDIA A1")]),
        (
            [LIMITED, CPU],
            [item("a", "real", backend="cuda"), item("b", "emulated", file="tests/kernels/test_triton_interpreted.py")],
            [
                ("cuda", "emulated", "triton", "A processor"),
                ("cuda", "real_otherdevice", "library", "NVIDIA A1 (limited to 8.0 compute capability)"),
            ],
        ),
        (
            [GPU, CPU],
            [item(lane, "real", lane=lane) for lane in ("library", "triton")],
            [("cuda", "real", lane, "NVIDIA A1") for lane in ("library", "triton")],
        ),
        (
            [CPU],
            [item("a", "real", backend="cpu", file="tests/backends/test_graphs.py")],
            [("cpu", "real", "avx2", "A processor")],
        ),
        (
            [GPU, CPU],
            [item("a", "emulated", file="tests/kernels/test_triton_interpreted.py")],
            [("cuda", "emulated", "triton", "A processor")],
        ),
        *(
            ([info, CPU], [item("a", "real", file=TRITON), item("b", "emulated", file=TRITON)], keys)
            for info, keys in (
                (RADEON, [("hip", "emulated", "triton", "A processor"), ("hip", "real", "triton", "AMD R1")]),
                (ARC, [("xpu", "emulated", "triton", "A processor"), ("xpu", "real", "triton", "Intel X1")]),
            )
        ),
        ([CPU], [item("a", "emulated", file=TRITON)], [("cuda", "emulated", "triton", "A processor")]),
        (
            [CPU],
            [item(name, "compile", file=TRITON, target=SimpleNamespace(backend=name)) for name in ("cuda", "hip")],
            [(name, "compile", "triton", "A processor") for name in ("cuda", "hip")],
        ),
        (
            [RADEON, CPU],
            [
                item("a", "real", file=OPS, target=SimpleNamespace(backend="hip", lane="")),
                item("b", "real", file=OPS, target=SimpleNamespace(backend="", lane="")),
            ],
            [("hip", "real", "triton", "AMD R1")],
        ),
        (
            [OTHER, CPU],
            [item("a", "real", "real_otherdevice", backend="mlx")],
            [("mlx", "real_otherdevice", "", "MLX's CPU device")],
        ),
        ([APPLE, CPU], [item("a", "real", "real_otherdevice", backend="mlx")], [("mlx", "real", "", "Apple M1")]),
        ([CPU], [item("a", "real", file="tests/backends/test_sampler.py"), item("b", backend="cpu")], []),
    ],
    indirect=["here"],
    ids=[
        "no-gpu",
        "library",
        "triton",
        "limited",
        "lanes",
        "cpu",
        "emulated",
        "triton-hip",
        "triton-xpu",
        "triton-interpreted",
        "triton-compiled",
        "ops",
        "otherdevice",
        "apple",
        "nobody's",
    ],
)
def test_results_are_counted_by_tier_implementation_and_machine(
    here: None, tests: list[Any], keys: list[Any], tmp_path: Path
) -> None:
    result = record(tmp_path / "results", tests, {})
    assert [(each.backend, each.tier, each.lane, each.machine) for each in result] == keys


@pytest.mark.parametrize("here", [[GPU, CPU]], indirect=True)
def test_interrupted_test_file_is_not_counted(here: None, tmp_path: Path) -> None:
    complete, cut = item("a", "real"), item("b", "real", file="tests/backends/test_cuda_split.py")
    recorder = Recorder(tmp_path / "results", "abc")
    recorder.pytest_collection_modifyitems([complete, cut, item("c", "real", file="tests/backends/test_cuda_split.py")])
    for one in (complete, cut):
        recorder.pytest_runtest_logreport(report(one, "call", "passed"))
        recorder.pytest_runtest_logfinish(one.nodeid)
    assert [each.file for each in read(tmp_path / "results")] == ["tests/backends/test_cuda.py"]


def counted(**changes: Any) -> Record:
    values: dict[str, Any] = {
        "backend": "cuda",
        "tier": "real",
        "lane": "library",
        "machine": "NVIDIA A1",
        "file": "tests/backends/test_cuda.py",
        "suite": True,
        "passed": 36,
        "failed": 0,
        "skipped": 1,
        "date": "2026-01-02",
        "commit": "abc1234",
        "sources": sources_of("cuda"),
    }
    return Record(**{**values, **changes})


@pytest.mark.parametrize("here", [[GPU, CPU]], indirect=True)
@pytest.mark.parametrize("exitstatus", [pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED])
def test_controller_counts_the_tests_of_xdist_workers(
    here: None, exitstatus: pytest.ExitCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = [item(name, "real") for name in ("a", "b", "c")]
    controller, worker = Recorder(tmp_path / "controller", "abc1234"), Recorder(tmp_path / "worker", "abc1234")
    worker.pytest_collection_modifyitems(tests)
    for one in tests:
        each = report(one, "call", "failed" if one is tests[0] else "passed")
        controller.pytest_runtest_logreport(each)
        controller.pytest_runtest_logfinish(one.nodeid)
        monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
        worker.pytest_runtest_logreport(each)
        worker.pytest_runtest_logfinish(one.nodeid)
        monkeypatch.delenv("PYTEST_XDIST_WORKER")
    controller.pytest_sessionfinish(exitstatus)
    complete = exitstatus == pytest.ExitCode.TESTS_FAILED
    assert [(one.passed, one.failed) for one in read(tmp_path / "controller")] == ([(2, 1)] if complete else [])
    assert not (tmp_path / "worker").exists()


@pytest.mark.parametrize("here", [[GPU, CPU]], indirect=True)
def test_controller_counts_no_file_whose_tests_did_not_all_end(here: None, tmp_path: Path) -> None:
    """An interrupt can end the workers before the controller, whose session then seems complete."""
    files = ("tests/backends/test_cuda.py", "tests/backends/test_cuda_split.py")
    cut, complete = ([item(name, "real", file=file) for name in ("a", "b")] for file in files)
    plain = item("plain", file="tests/backends/test_cuda_split.py")
    worker = Recorder(tmp_path / "worker", "abc1234")
    worker.pytest_collection_modifyitems([*cut, *complete])
    controller = Recorder(tmp_path / "controller", "abc1234")
    controller.pytest_xdist_node_collection_finished(None, [one.nodeid for one in (*cut, *complete, plain)])
    for one in (cut[0], *complete, plain):
        controller.pytest_runtest_logreport(report(one, "call", "passed"))
        controller.pytest_runtest_logfinish(one.nodeid)
    controller.pytest_sessionfinish(pytest.ExitCode.OK)
    assert [(one.file, one.passed) for one in read(tmp_path / "controller")] == [(files[1], 2)]


def test_later_run_replaces_an_earlier_run(tmp_path: Path) -> None:
    file = tmp_path / "results"
    merge([counted(), counted(suite=False, passed=5), counted(lane="triton"), counted(machine="NVIDIA B2")], file)
    for commit in ("d", "e"):
        skipped = [counted(lane=lane, passed=0, skipped=36, commit=commit) for lane in ("triton", "references")]
        merge([counted(passed=30, failed=6), *skipped], file)
    assert [(one.lane, one.machine, one.passed, one.commit) for one in read(file)] == [
        ("library", "NVIDIA A1", 30, "abc1234"),
        ("library", "NVIDIA B2", 36, "abc1234"),
        ("references", "NVIDIA A1", 0, "e"),
        ("triton", "NVIDIA A1", 36, "abc1234"),
    ]


PLACE, SUITE, WHEN = "NVIDIA A1, C++ kernels", "36 passed, 1 skipped", "2026-01-02"
ON_CPU = counted(
    backend="mlx",
    tier="real_otherdevice",
    lane="",
    machine="MLX's CPU device",
    file="tests/backends/test_mlx.py",
    sources="",
)
LATER = counted(file="b", suite=False, passed=4, skipped=0, date="2026-01-05", sources="old")
GRAPHS = counted(file="tests/backends/test_cuda_split.py", passed=30, skipped=0)
VERIFIED = ("verified", PLACE, SUITE, "", WHEN)


@pytest.mark.parametrize(
    ("records", "rows"),
    [
        ([counted(passed=0, skipped=36)], []),
        ([counted(tier="emulated")], []),
        ([counted()], [VERIFIED]),
        ([counted(sources="old")], [(*VERIFIED[:4], f"{WHEN}, of an earlier version")]),
        (
            [counted(), LATER],
            [("verified", PLACE, SUITE, "4 passed", f"{WHEN} to 2026-01-05, of an earlier version")],
        ),
        ([counted(), GRAPHS], [("verified", PLACE, SUITE, "30 passed", WHEN)]),
        ([GRAPHS], [("partly", PLACE, "", "30 passed", WHEN)]),
        ([counted(failed=2)], [("**fails**", PLACE, "36 passed, 2 failed, 1 skipped", "", WHEN)]),
        (
            [counted(), counted(lane="triton", passed=30, failed=6)],
            [VERIFIED, ("**fails**", "NVIDIA A1, Triton alone", "30 passed, 6 failed, 1 skipped", "", WHEN)],
        ),
        ([ON_CPU], [("untested", "MLX's CPU device", SUITE, "", f"{WHEN}, of an earlier version")]),
    ],
)
def test_pages_claim_only_passed_tests(records: list[Record], rows: list[tuple[str, ...]]) -> None:
    assert rows_of(records) == rows


def options(*arguments: str, **overrides: str) -> Any:
    return SimpleNamespace(
        args=arguments, getoption=lambda name: {"-k": "", "-m": "", "--results": "x", **overrides}[name]
    )


def test_partial_files_and_unknown_commits_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(recording.COMMIT, "abc")
    for config in (options("tests/a.py::b"), options(**{"-k": "b"}), options(**{"-m": "real"})):
        with pytest.raises(pytest.UsageError, match="complete test files"):
            recording.make_recorder(config)
    monkeypatch.delenv(recording.COMMIT)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(pytest.UsageError, match=f"set the variable {recording.COMMIT}"):
        recording.make_recorder(options("tests"))


def test_results_file_is_valid() -> None:
    for one in read():
        assert one.tier in recording.TIERS
        assert one.backend in recording.backends.ORDER
        assert one.commit
