"""The processor and memory of this machine, read from the system. Uses no tensor library."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import psutil

# Linux flag -> title in doctor, the most important first.
FEATURES: Mapping[str, str] = {
    "amx_tile": "AMX",
    "amx_bf16": "AMX BF16",
    "amx_int8": "AMX INT8",
    "amx_fp16": "AMX FP16",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 BF16",
    "avx512_fp16": "AVX-512 FP16",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX VNNI",
    "avx2": "AVX2",
    "asimd": "NEON",
    "sve": "SVE",
    "bf16": "Arm BF16",
    "i8mm": "Arm I8MM",
}

# Flags of processors with bfloat16 matrix instructions.
BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})

# ISA variants of the kernels (kernels/cpu/dispatch.cpp) and the flags that they need, the fastest first.
_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"}
VARIANTS: Mapping[str, frozenset[str]] = {
    "amx": _AVX512 | {"amx_tile", "amx_bf16", "amx_int8"},
    "avx512": _AVX512,
    "avxvnni": _AVX2 | {"avx_vnni"},
    "avx2": _AVX2,
    "generic": frozenset(),
}
BF16_VARIANTS = frozenset({"amx", "avx512"})

_CPUINFO = Path("/proc/cpuinfo")
_CGROUP = Path("/sys/fs/cgroup")


def cpu_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """The processor flags, as named by Linux; empty if the file does not exist."""
    for line in _lines(cpuinfo):
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def features(flags: frozenset[str]) -> dict[str, str]:
    """Title -> "yes" or "no", for every feature of this architecture (x86 or Arm)."""
    arm = "asimd" in flags or platform.machine() in ("aarch64", "arm64")
    of_arm = ("asimd", "sve", "bf16", "i8mm")
    return {title: "yes" if flag in flags else "no" for flag, title in FEATURES.items() if (flag in of_arm) == arm}


def variant(flags: frozenset[str]) -> str:
    """The ISA variant for a processor with these flags; LOCALLLM_CPU_LANE overrides it."""
    return os.environ.get("LOCALLLM_CPU_LANE") or next(name for name, needs in VARIANTS.items() if needs <= flags)


def cpu_name(cpuinfo: Path = _CPUINFO) -> str:
    for line in _lines(cpuinfo):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Physical cores that this process may use: a second thread per core adds no speed to matrix products."""
    physical = psutil.cpu_count(logical=False) or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return max(1, min(physical, allowed))


def memory(cgroup: Path = _CGROUP) -> tuple[int, int]:
    """(total, free) bytes, limited by the cgroup of a container."""
    system = psutil.virtual_memory()
    limit, used = (_number(cgroup / name) for name in ("memory.max", "memory.current"))
    if limit is None or used is None:
        return system.total, system.available
    return min(system.total, limit), max(0, min(system.available, limit - used))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _number(file: Path) -> int | None:
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdecimal() else None
