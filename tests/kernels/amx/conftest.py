"""Builds the AMX tile kernels as a library of their own, for the CPU's AMX instructions or for the emulator."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[3] / "kernels" / "cpu"
CACHE = Path(__file__).parents[3] / "build" / "tests"
COMMON = "-O2 -std=c++20 -fPIC -fvisibility=hidden -ffp-contract=fast -fno-math-errno -Wno-psabi -pthread".split()
AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx512vnni".split()
AVX2 = "-mavx2 -mfma -mf16c".split()
TILES = "-mamx-tile -mamx-bf16 -mamx-int8".split()
KERNELS = ("products/amx.cpp", "moe/amx.cpp", "attention/amx.cpp")


def cpu_flags() -> set[str]:
    """The CPU flags that the system reports; empty if it reports none."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((set(line.split(":")[1].split()) for line in lines if line.startswith("flags")), set())


def real() -> bool:
    return {"amx_tile", "amx_bf16", "amx_int8", "avx512_bf16"} <= cpu_flags()


def build() -> Path:
    """Compile the library once for these sources and flags. Concurrent tests share the file."""
    has = cpu_flags()
    if real():
        flags = [*AVX512, *AVX2, *TILES]
    elif {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"} <= has:
        flags = ["-DTILES_EMULATED", *AVX512, *AVX2]
    else:
        flags = ["-DTILES_EMULATED", *(AVX2 if {"avx2", "fma", "f16c"} <= has else [])]
    files = [Path(__file__).with_name("harness.cpp"), *(SOURCES / name for name in KERNELS)]
    seen = hashlib.sha256(repr(flags).encode())
    for source in sorted([files[0], *SOURCES.rglob("*.h"), *(SOURCES / name for name in KERNELS)]):
        seen.update(source.read_bytes())
    target = CACHE / f"amx-{seen.hexdigest()[:16]}.so"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(f".{os.getpid()}")
        flags += ["-DVARIANT=amx", f"-I{SOURCES}", "-shared"]
        command = ["g++", *COMMON, *flags, *map(str, files), "-o", str(fresh)]
        subprocess.run(command, check=True, timeout=300)
        fresh.replace(target)
    return target


def pytest_itemcollected(item: pytest.Item) -> None:
    if "tiles" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.real if real() else pytest.mark.emulated)


@pytest.fixture(scope="session")
def tiles() -> ctypes.CDLL:
    """The library built from harness.cpp."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    library = ctypes.CDLL(str(build()))
    library.open_tiles.restype = ctypes.c_bool
    if not library.open_tiles():
        pytest.skip("the system refuses the tiles' registers")
    return library
