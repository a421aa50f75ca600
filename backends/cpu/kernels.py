"""The CPU kernels and threads, for doctor. Uses no tensor library."""

from __future__ import annotations

import os

from ...kernels.library import LibraryMissing, find_library
from .machine import cores, variant


def kernels(flags: frozenset[str]) -> dict[str, str]:
    """Title -> value, for a processor with these flags."""
    try:
        find_library()
    except LibraryMissing as error:
        return {"kernels": f"none, torch only: {error}", "threads": str(cores())}
    forced = "forced by LOCALLLM_CPU_LANE" if os.environ.get("LOCALLLM_CPU_LANE") else "the best for this processor"
    return {"kernels": f"{variant(flags)}, {forced}", "threads": _threads()}


def _threads() -> str:
    """The number of threads and its source, as in kernels/cpu/team.cpp."""
    for variable in ("LOCALLLM_THREADS", "OMP_NUM_THREADS"):
        if (count := os.environ.get(variable, "0").partition(",")[0]) not in ("0", ""):
            return f"{count}, from {variable}"
    return f"{cores()}, one per physical core"
