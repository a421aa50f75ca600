"""Triton compiles at run time: the check names what is missing and how to install it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.kernels import triton_problem as module
from localllm.kernels.triton_problem import triton_problem


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with Triton, gcc and Python's headers. Returns the folder of the headers."""
    triton_problem.cache_clear()
    compiler = tmp_path / "gcc"
    compiler.touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    yield tmp_path
    triton_problem.cache_clear()


def test_a_complete_machine_has_no_problem(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_problem() == ""
    triton_problem.cache_clear()
    (machine / "gcc").rename(machine / "cc-13")
    monkeypatch.setenv("CC", str(machine / "cc-13"))
    assert triton_problem() == ""


def test_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert triton_problem() == "Triton is not installed"


def test_missing_compiler_is_named(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "gcc").unlink()
    assert "needs a C compiler at run time: install one (Debian: apt install gcc)" in triton_problem()
    triton_problem.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "needs a C compiler" in triton_problem()


def test_missing_headers_are_named(machine: Path) -> None:
    (machine / "Python.h").unlink()
    assert triton_problem().startswith(f"Triton needs the headers of Python, {machine / 'Python.h'}")
    assert "apt install python3-dev" in triton_problem()
