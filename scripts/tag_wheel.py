"""Checks a wheel with CUDA kernels, and gives it the platform tag that its libraries permit.

    python -m scripts.tag_wheel WHEEL FOLDER    writes the tagged wheel into FOLDER and prints its path

auditwheel finds the tag: the oldest C library that has all functions that the kernel libraries call.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

LIBRARIES = ("localllm/kernels/cpu/localllm_cpu.so", "localllm/kernels/cuda/localllm_cuda.so")
FROM_TORCH = {"libtorch_cpu.so", "libtorch_cuda.so"}  # libraries that the torch of the user provides
MAX_BYTES = 15_000_000  # compressed size of the libraries; the built-in model is larger


def tag(wheel: Path, folder: Path) -> Path:
    """The path of the tagged wheel."""
    missing = set(LIBRARIES) - set(ZipFile(wheel).namelist())
    if missing:
        lacks = ", ".join(sorted(missing))
        build = "cmake --build build/wheel/kernels --target localllm_cuda"
        raise SystemExit(f"error: {wheel} lacks {lacks}: the build of the kernels failed; `{build}` shows the error")
    if size(wheel) > MAX_BYTES:
        raise SystemExit(f"error: the kernels in {wheel} have {size(wheel)} bytes, more than {MAX_BYTES}")
    audit = json.loads(_run("auditwheel", "show", "--json", str(wheel)))
    foreign = set(audit["external_libs"]) - FROM_TORCH
    if foreign:
        raise SystemExit(f"error: the kernels need {', '.join(sorted(foreign))}, which not every system has")
    platform = audit["sym_tag"]
    if not re.match(r"manylinux_\d+_\d+_", platform):
        raise SystemExit(f"error: no manylinux tag fits, only {platform}: the compiler or its C++ library is too new")
    folder.mkdir(parents=True, exist_ok=True)
    copy = Path(shutil.copy2(wheel, folder))
    name = _run("wheel", "tags", "--remove", "--platform-tag", platform, str(copy)).strip()
    return folder / name


def size(wheel: Path) -> int:
    """Compressed bytes of the kernel libraries in a wheel."""
    archive = ZipFile(wheel)
    return sum(archive.getinfo(name).compress_size for name in LIBRARIES)


def _run(*command: str) -> str:
    return subprocess.run([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    print(tag(Path(sys.argv[1]), Path(sys.argv[2])))
