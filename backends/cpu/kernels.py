"""Describes the CPU kernels and their threads for `localllm doctor`. Uses no tensor library."""

from __future__ import annotations

import os

from ...kernels.compiled.library import LibraryMissing, find_library, isa_variants
from ..machine import cores, variant


def kernels(flags: frozenset[str]) -> dict[str, str]:
    """The kernels and threads that a processor with these flags uses, as title -> value pairs."""
    try:
        compiled = isa_variants(find_library())
        name = variant(flags, compiled)
        if not name:
            raise LibraryMissing(f"they are compiled for other processors ({', '.join(compiled)}): run make build")
    except LibraryMissing as error:
        return {"kernels": f"none, torch only: {error}", "threads": str(cores())}
    reason = "forced by LOCALLLM_CPU_LANE" if os.environ.get("LOCALLLM_CPU_LANE") else "the best for this processor"
    return {"kernels": f"{name}, {reason}", "threads": _threads()}


def _threads() -> str:
    """The number of threads and its source, by the rules of kernels/cpu/team/team.cpp."""
    for variable in ("LOCALLLM_THREADS", "OMP_NUM_THREADS"):
        count, _, _ = os.environ.get(variable, "").partition(",")
        if count not in ("0", ""):
            return f"{count}, from {variable}"
    return f"{cores()}, one per physical core"
