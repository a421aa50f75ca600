"""Whether Triton works on this machine. Its own driver needs a C compiler and Python's headers at run time;
nvidia/driver.py takes its place, for the GPUs that it supports."""

from __future__ import annotations

import ctypes
import os
import shutil
import sysconfig
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

DRIVER_VERSIONS = ("3.6.", "3.7.")  # versions of Triton with the interface of nvidia/driver.py


@cache
def triton_problem() -> str:
    """The reason why Triton cannot compile kernels, and how to mend it; empty if it can."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    return "" if driver_supported() else compiler_problem()


@cache
def driver_supported() -> bool:
    """True if nvidia/driver.py can take the place of Triton's own driver: the driver that it calls is installed, and
    Triton has a version with the same interface."""
    try:
        ctypes.CDLL("libcuda.so.1")
        return version("triton").startswith(DRIVER_VERSIONS)
    except (OSError, PackageNotFoundError):
        return False


@cache
def compiler_problem() -> str:
    """The reason why Triton's own driver cannot be compiled, and how to mend it; empty if it can."""
    # The same search as in triton/runtime/build.py.
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not compiler or not shutil.which(compiler):
        return "Triton needs a C compiler at run time: install one (Debian: apt install gcc)"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_path("include", scheme)) / "Python.h"
    if not header.is_file():
        return f"Triton needs the headers of Python, {header}: install them (Debian: apt install python3-dev)"
    return ""
