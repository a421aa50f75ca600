"""Whether Triton can compile kernels on this machine. It needs a C compiler and Python's headers at run time."""

from __future__ import annotations

import os
import shutil
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def triton_problem() -> str:
    """The reason why Triton cannot compile kernels, and how to mend it; empty if it can."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    # The same search as in triton/runtime/build.py.
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not compiler or not shutil.which(compiler):
        return "Triton needs a C compiler at run time: install one (Debian: apt install gcc)"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_path("include", scheme)) / "Python.h"
    if not header.is_file():
        return f"Triton needs the headers of Python, {header}: install them (Debian: apt install python3-dev)"
    return ""
