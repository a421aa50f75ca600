"""Facts about the machine, without MLX and with it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import psutil
import pytest

from localllm.backends.mlx import machine


def test_memory_is_the_main_memory() -> None:
    total, free = machine.memory()
    assert total == psutil.virtual_memory().total
    assert 0 < free <= total


def test_chip_is_the_answer_of_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[-1] == "machdep.cpu.brand_string"
        assert options["check"]
        assert options["timeout"] <= 10
        return subprocess.CompletedProcess(command, 0, "Apple M4 Pro\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert machine.apple_chip() == "Apple M4 Pro"


@pytest.mark.parametrize("error", [OSError("no such file"), subprocess.TimeoutExpired("sysctl", 5)], ids=repr)
def test_chip_without_sysctl_has_a_general_name(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def run(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    assert machine.apple_chip() == "Apple silicon"


@pytest.mark.real_otherdevice
def test_bandwidth_is_bytes_by_the_median_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    monkeypatch.setattr(machine, "BYTES", 2**20)
    seconds = iter([0.0, 9.0, 10.0, 12.0, 20.0, 21.0, 30.0, 34.0, 40.0, 42.0, 50.0, 50.5])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(seconds))
    assert machine.read_bandwidth() == 2**20 / 2.0


def test_import_does_not_import_mlx() -> None:
    code = "import sys, localllm.backends.mlx.machine; assert 'mlx.core' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
