"""The command that installs llama-cpp-python, which compiles llama.cpp for the devices of its CMake flags."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from .machine import cpu_flags

PACKAGE = "llama-cpp-python"
REQUIREMENT = "llama-cpp-python>=0.3.36,<0.4"
MAKE = "make build GGUF=1"  # in the root folder of a checkout
ROOT = Path(__file__).resolve().parents[1]

# Hardware -> CMake flags of llama.cpp. Each needs the compiler of that hardware (docs/gguf.md).
DEVICES: Mapping[str, str] = {
    "NVIDIA": "-DGGML_CUDA=ON",
    "AMD": "-DGGML_HIP=ON",
    "Intel": "-DGGML_SYCL=ON -DCMAKE_C_COMPILER=icx -DCMAKE_CXX_COMPILER=icpx",
    "Apple": "-DGGML_METAL=ON",
    "any GPU": "-DGGML_VULKAN=ON",
}


# The file of a GPU driver -> a key of DEVICES.
DRIVERS: Mapping[Path, str] = {Path("/proc/driver/nvidia/version"): "NVIDIA", Path("/dev/kfd"): "AMD"}


def repair_command(*, again: bool = False) -> str:
    """The command that installs llama.cpp for the CPU: make in a checkout with its own .venv, else pip.

    `again` replaces an installed build; make always does that."""
    return MAKE if is_checkout() else install_command(again=again)


def is_checkout() -> bool:
    """Whether the Makefile beside these sources installs into this Python."""
    return (ROOT / "Makefile").is_file() and Path(sys.prefix) == ROOT / ".venv"


def gpu_command() -> str:
    """The shell command that replaces an installed build without a GPU by one for the GPU of this machine; for Vulkan
    if no driver is recognised."""
    installed = (device for file, device in DRIVERS.items() if file.exists())
    return install_command(next(installed, "any GPU"), again=True)


def vulkan_command() -> str:
    """The shell command that builds llama.cpp for any GPU with Vulkan."""
    if is_checkout():
        return f"{MAKE} CMAKE_ARGS={DEVICES['any GPU']}"
    return install_command("any GPU", again=find_spec("llama_cpp") is not None)


def without_torch(device: str) -> str:
    """The sentence for the user of a GPU or NPU for which torch has no kernels."""
    return (
        f"torch has no kernels for {device}: GGUF models run on the GPU with llama.cpp and Vulkan: {vulkan_command()}"
    )


def install_command(device: str = "", *, again: bool = False) -> str:
    """The shell command that installs llama.cpp for this Python. `device`: a key of DEVICES; empty: the CPU.

    `again` replaces an installed build, for example one without that device."""
    flags = ["-DLLAVA_BUILD=OFF", *_compiler_flags(device), *shlex.split(DEVICES[device] if device else "")]
    options = ["--force-reinstall", "--no-cache-dir", "--no-deps"] if again else []
    command = [sys.executable, "-m", "pip", "install", *options, "--no-binary", PACKAGE, REQUIREMENT]
    return f"CMAKE_ARGS={shlex.quote(' '.join(flags))} {shlex.join(command)}"


def main() -> None:
    """Become the process of the command. make also compiles for the devices of CMAKE_ARGS."""
    os.chdir(ROOT)
    os.execvp("sh", ["sh", "-c", repair_command(again=find_spec("llama_cpp") is not None)])


def _compiler_flags(device: str) -> list[str]:
    """GCC 12 removes stores that AMX reads; llama.cpp then crashes in the prefill of quantised weights."""
    is_gcc = platform.system() == "Linux" and device != "Intel"
    return ["-DCMAKE_CXX_FLAGS=-fno-dse"] if is_gcc and "amx_int8" in cpu_flags() else []
