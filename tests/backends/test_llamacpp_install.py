"""The command that installs llama.cpp."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from localllm.backends import llamacpp, llamacpp_install
from localllm.engine.runner import Unavailable


def parsed(command: str) -> tuple[list[str], list[str]]:
    """(CMake flags, words of the command)"""
    variable, *words = shlex.split(command)
    name, _, flags = variable.partition("=")
    assert name == "CMAKE_ARGS"
    return shlex.split(flags), words


def test_command_installs_for_this_python_from_source() -> None:
    flags, words = parsed(llamacpp_install.install_command())
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    assert words[-3:] == ["--no-binary", "llama-cpp-python", llamacpp_install.REQUIREMENT]
    assert os.access(words[0], os.X_OK)
    assert not any("GGML" in flag for flag in flags)


@pytest.mark.parametrize("device", llamacpp_install.DEVICES)
def test_command_of_a_device_replaces_the_build(device: str) -> None:
    flags, words = parsed(llamacpp_install.install_command(device, again=True))
    assert any(flag.startswith("-DGGML_") and flag.endswith("=ON") for flag in flags)
    assert {"--force-reinstall", "--no-cache-dir"} <= set(words)


@pytest.mark.parametrize(
    ("driver", "flag"), [("NVIDIA", "-DGGML_CUDA=ON"), ("AMD", "-DGGML_HIP=ON"), ("", "-DGGML_VULKAN=ON")]
)
def test_command_of_a_gpu_follows_the_driver(
    driver: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {tmp_path / device: device for device in ("NVIDIA", "AMD")}
    monkeypatch.setattr(llamacpp_install, "DRIVERS", files)
    if driver:
        (tmp_path / driver).touch()
    assert flag in parsed(llamacpp_install.gpu_command())[0]


def test_a_checkout_installs_with_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp_install, "ROOT", tmp_path)
    assert llamacpp_install.repair_command() == llamacpp_install.install_command()
    (tmp_path / "Makefile").touch()
    assert llamacpp_install.repair_command(again=True) == llamacpp_install.install_command(again=True)
    monkeypatch.setattr(llamacpp_install.sys, "prefix", str(tmp_path / ".venv"))
    assert llamacpp_install.repair_command() == "make build GGUF=1"


@pytest.mark.parametrize("is_installed", [True, False])
def test_missing_library_has_a_command(is_installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp, "problem", lambda: "it does not work")
    monkeypatch.setattr(llamacpp, "is_installed", lambda: is_installed)
    monkeypatch.setattr(llamacpp_install, "ROOT", Path("/nowhere"))
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
    monkeypatch.setattr(llamacpp_install, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(llamacpp_install.platform, "system", lambda: "Linux")
    assert ("-fno-dse" in llamacpp_install.install_command()) == ("amx_int8" in flags)


def test_a_gpu_that_torch_does_not_serve_gets_the_vulkan_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp_install, "ROOT", tmp_path)
    command = llamacpp_install.without_torch("Iris Xe").partition("Vulkan: ")[2]
    assert "-DGGML_VULKAN=ON" in parsed(command)[0]
    (tmp_path / "Makefile").touch()
    monkeypatch.setattr(llamacpp_install.sys, "prefix", str(tmp_path / ".venv"))
    sentence = llamacpp_install.without_torch("Iris Xe")
    assert sentence.startswith("torch has no kernels for Iris Xe: ")
    assert sentence.endswith(": make build GGUF=1 CMAKE_ARGS=-DGGML_VULKAN=ON")
