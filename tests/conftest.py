"""Fixtures of all tests: temporary folders instead of the user's, and a count of outcomes by tier at the end."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from .recording import ROOT, TIERS, in_worker, make_recorder, tier_of

GRACE = 30  # seconds that a test may take beyond twice its timeout


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings, data, cache, logs, sockets and the model cache are in a new folder. Hugging Face is never contacted."""
    home = tmp_path_factory.mktemp("home")
    runtime = home / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(home))
    for name in ("CONFIG", "DATA", "CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(home / name.lower()))
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_ENDPOINT", "LOCALLLM_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCALLLM_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return home


class TierCount:
    """Counts the outcomes of the tests of each tier. A test without a tier makes no claim about a device.

    The tier is stored in the report of a test, since the controller of pytest-xdist has no test items.
    """

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {tier: Counter() for tier in TIERS}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if tier := tier_of(item):
                item.user_properties.append(("tier", tier))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            for name, value in report.user_properties:
                if name == "tier":
                    self.counts[str(value)][report.outcome] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        for tier, count in self.counts.items():
            if not count and not config.getoption("--expect-tiers"):
                continue
            outcomes = ", ".join(f"{number} {outcome}" for outcome, number in sorted(count.items())) or "none"
            terminalreporter.write_line(f"tier {tier}: {outcomes}")
        if "FAKE_ACL" not in os.environ:
            terminalreporter.write_line("tests/npu: at most their contract tests ran; make test-npu runs them all")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.getoption("--expect-tiers") and not in_worker():
            idle = sorted(tier for tier in TIERS if not self.counts[tier]["passed"])
            if idle and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
                print(f"\nexpected tiers did not run: {', '.join(idle)}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--expect-tiers", action="store_true", help="fail if no test of a tier passed")
    parser.addoption(
        "--record-tiers", action="store_true", help="count the tests that pass, by backend and tier, in --results"
    )
    parser.addoption("--results", default=str(ROOT / "tests" / "results.jsonl"), help="the file of --record-tiers")
    parser.addoption("--slow", action="store_true", help="also run the tests with the marker slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    slow = {item for item in items if item.get_closest_marker("slow")}
    config.hook.pytest_deselected(items=list(slow))
    items[:] = [item for item in items if item not in slow]


@contextmanager
def watched(item: pytest.Item) -> Iterator[None]:
    """End the process, with the calls of all threads, if the block takes much longer than the timeout of the test.

    pytest-timeout interrupts only Python code, and only once per test, so a fixture can wait forever after a timeout.
    CI would then wait until its limit, and its output would not name the test.
    """
    marker = item.get_closest_marker("timeout")
    seconds = float(marker.args[0] if marker and marker.args else item.config.getini("timeout"))
    stderr = item.config.stash[fault_handler_stderr_fd_key]  # the error output before pytest captured it
    faulthandler.dump_traceback_later(2 * seconds + GRACE, exit=True, file=stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with watched(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with watched(item):  # again, because pytest cancels all timers of faulthandler after a failure
        return (yield)


def pytest_configure(config: pytest.Config) -> None:
    # A background job of a shell ignores SIGINT, and the programs that the tests start would inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(TierCount(), "tier-count")
    if config.getoption("--record-tiers"):
        config.pluginmanager.register(make_recorder(config), "tier-record")
