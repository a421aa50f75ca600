"""The limits of time of tests/conftest.py: a test or a fixture that never returns ends the test run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .recording import ROOT

CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests import conftest
from tests.conftest import pytest_runtest_protocol, pytest_runtest_teardown
conftest.GRACE = 0
"""
FIXTURE_WAITS_AFTER_A_TIMEOUT = """
import threading, time
import pytest

@pytest.fixture
def endless():
    yield
    threading.Event().wait()

@pytest.mark.timeout(0.5)
def test_one(endless):
    time.sleep(20)
"""


def test_fixture_that_waits_after_a_timeout_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_endless.py").write_text(FIXTURE_WAITS_AFTER_A_TIMEOUT)
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(tmp_path)]
    result = subprocess.run(words, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert result.returncode == 1
    assert "in endless" in result.stderr, "the calls of the thread that waits"
