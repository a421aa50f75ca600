"""Triton compiles at run time: the check names the missing package and how to install it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.kernels.triton import problem as module
from localllm.kernels.triton.problem import triton_problem


def clear() -> None:
    for function in (triton_problem, module.compiler_problem, module.driver_supported):
        function.cache_clear()


def no_library(name: str) -> None:
    raise OSError(name)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with Triton, gcc and Python's headers, and no NVIDIA GPU. Returns the folder of the headers."""
    clear()
    compiler = tmp_path / "gcc"
    compiler.touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    monkeypatch.setattr(module.ctypes, "CDLL", no_library)
    yield tmp_path
    clear()


def test_a_complete_machine_has_no_problem(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_problem() == ""
    clear()
    (machine / "gcc").rename(machine / "cc-13")
    monkeypatch.setenv("CC", str(machine / "cc-13"))
    assert triton_problem() == ""


def test_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert triton_problem() == "Triton is not installed"


def test_missing_compiler_is_named(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "gcc").unlink()
    assert "needs a C compiler at run time: install one (Debian: apt install gcc)" in triton_problem()
    clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "needs a C compiler" in triton_problem()


def test_missing_headers_are_named(machine: Path) -> None:
    (machine / "Python.h").unlink()
    assert triton_problem().startswith(f"Triton needs the headers of Python, {machine / 'Python.h'}")
    assert "apt install python3-dev" in triton_problem()


@pytest.mark.parametrize(("version", "problem"), [("3.7.1", False), ("3.6.0", False), ("3.8.0", True)])
def test_nvidia_gpu_needs_no_compiler(
    machine: Path, version: str, problem: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions of Triton with an unknown interface use Triton's own driver, which needs the compiler."""
    (machine / "gcc").unlink()
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: object())
    monkeypatch.setattr(module, "version", lambda name: version)
    assert bool(triton_problem()) == problem
