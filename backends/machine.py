"""The processor and memory of this machine, read from the system, for every backend that computes on it. Uses no tensor
library."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Mapping
from pathlib import Path

import psutil

# Processor flag of Linux -> title in `localllm doctor`, the most important first.
X86_FEATURES: Mapping[str, str] = {
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
}
ARM_FEATURES: Mapping[str, str] = {
    "asimd": "NEON",
    "sve": "SVE",
    "bf16": "Arm BF16",
    "i8mm": "Arm I8MM",
}

# Flags of processors with bfloat16 matrix instructions.
BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})

# ISA variants of the kernels (kernels/cpu/isa/dispatch.cpp) and the flags that they need, the fastest first.
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

# Iterations that an idle OpenMP thread spins before it sleeps. With OpenMP's default of 300,000, decode is many times
# slower if another program uses a core. Without spinning, small models are slower.
SPIN = "5000"

_CPUINFO = Path("/proc/cpuinfo")
_CGROUP = Path("/sys/fs/cgroup")


def cpu_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """The processor flags, as named by Linux; empty if `cpuinfo` does not exist."""
    entries = _entries(cpuinfo)
    return frozenset(entries.get("flags", entries.get("Features", "")).split())


def features(flags: frozenset[str]) -> dict[str, str]:
    """Each feature of this architecture (x86 or Arm) by its title: "yes" or "no"."""
    is_arm = "asimd" in flags or platform.machine() in ("aarch64", "arm64")
    titles = ARM_FEATURES if is_arm else X86_FEATURES
    return {title: "yes" if flag in flags else "no" for flag, title in titles.items()}


def variant(flags: frozenset[str], compiled: Collection[str] = VARIANTS) -> str:
    """The fastest of the `compiled` ISA variants for a processor with these flags; empty if none runs on it. The
    environment variable LOCALLLM_CPU_LANE overrides it."""
    best = next((name for name, needs in VARIANTS.items() if needs <= flags and name in compiled), "")
    return os.environ.get("LOCALLLM_CPU_LANE") or best


def cpu_name(cpuinfo: Path = _CPUINFO) -> str:
    """The model name of the processor; without `cpuinfo` the architecture."""
    return _entries(cpuinfo).get("model name") or platform.processor() or platform.machine()


def cores() -> int:
    """Number of physical cores that this process may use. Logical cores do not count: a second thread on a core makes
    no matrix product faster."""
    physical = psutil.cpu_count(logical=False) or 1
    if hasattr(os, "sched_getaffinity"):
        return max(1, min(physical, len(os.sched_getaffinity(0))))
    return physical


def limit_spinning() -> None:
    """Let idle OpenMP threads sleep early, unless the environment says when. Call this before the import of a library
    that uses OpenMP, which reads the environment then."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)


def memory(cgroup: Path = _CGROUP) -> tuple[int, int]:
    """(total, free) bytes of main memory, limited by the cgroup of a container."""
    system = psutil.virtual_memory()
    limit = _number(cgroup / "memory.max")
    used = _number(cgroup / "memory.current")
    if limit is None or used is None:
        return system.total, system.available
    return min(system.total, limit), max(0, min(system.available, limit - used))


def text(file: Path) -> str:
    """The contents of a file of the system, without the last line break; empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _entries(cpuinfo: Path) -> dict[str, str]:
    """The entries of `cpuinfo`, key -> value. A key that several processors have gets the first processor's value."""
    entries: dict[str, str] = {}
    for line in text(cpuinfo).splitlines():
        key, _, value = line.partition(":")
        entries.setdefault(key.strip(), value.strip())
    return entries


def _number(file: Path) -> int | None:
    number = text(file)
    return int(number) if number.isdecimal() else None
