"""The command that installs llama.cpp."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from localllm.backends import llamacpp
from localllm.backends.llamacpp import installing
from localllm.engine.runner import Unavailable


def parsed(command: str) -> tuple[list[str], list[str]]:
    """(CMake flags, words of the command)"""
    variable, *words = shlex.split(command)
    name, _, flags = variable.partition("=")
    assert name == "CMAKE_ARGS"
    return shlex.split(flags), words


def test_command_installs_for_this_python_from_source() -> None:
    flags, words = parsed(installing.install_command())
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    assert words[-3:] == ["--no-binary", "llama-cpp-python", installing.REQUIREMENT]
    assert os.access(words[0], os.X_OK)
    assert not any("GGML" in flag for flag in flags)


@pytest.mark.parametrize("device", installing.DEVICES)
def test_command_of_a_device_replaces_the_build(device: str) -> None:
    flags, words = parsed(installing.install_command(device, again=True))
    assert any(flag.startswith("-DGGML_") and flag.endswith("=ON") for flag in flags)
    assert {"--force-reinstall", "--no-cache-dir"} <= set(words)


@pytest.mark.parametrize(
    ("driver", "flag"), [("NVIDIA", "-DGGML_CUDA=ON"), ("AMD", "-DGGML_HIP=ON"), ("", "-DGGML_VULKAN=ON")]
)
def test_command_of_a_gpu_follows_the_driver(
    driver: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {tmp_path / device: device for device in ("NVIDIA", "AMD")}
    monkeypatch.setattr(installing, "DRIVERS", files)
    if driver:
        (tmp_path / driver).touch()
    assert flag in parsed(installing.gpu_command())[0]


def test_a_checkout_installs_with_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "ROOT", tmp_path)
    assert installing.repair_command() == installing.install_command()
    (tmp_path / "Makefile").touch()
    assert installing.repair_command(again=True) == installing.install_command(again=True)
    monkeypatch.setattr(installing.sys, "prefix", str(tmp_path / ".venv"))
    assert installing.repair_command() == "make build GGUF=1"


@pytest.mark.parametrize("is_installed", [True, False])
def test_missing_library_has_a_command(is_installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp, "problem", lambda: "it does not work")
    monkeypatch.setattr(llamacpp, "is_installed", lambda: is_installed)
    monkeypatch.setattr(installing, "ROOT", Path("/nowhere"))
    found = llamacpp.probe()
    assert isinstance(found, Unavailable)
    assert found.reason == f"it does not work: {found.install}"
    assert ("--force-reinstall" in found.install) == is_installed


def test_doctor_shows_the_build_and_the_command_for_a_gpu() -> None:
    device = llamacpp.probe()
    if isinstance(device, Unavailable):
        pytest.skip(device.reason)
    assert device.features["llama-cpp-python"] == version("llama-cpp-python")
    names = device.features["devices"].split(", ")
    assert "CPU" in names
    assert ("to add a GPU" in device.features) == (names == ["CPU"])


@pytest.mark.parametrize("flags", [{"avx2"}, {"avx2", "amx_int8"}])
def test_only_a_cpu_with_amx_gets_the_flag_for_gcc(flags: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(installing.platform, "system", lambda: "Linux")
    assert ("-fno-dse" in installing.install_command()) == ("amx_int8" in flags)
