"""What a load on a GPU needs to know about its Triton kernels."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

from ..selftest import sources_hash


def warnings(problem: str) -> tuple[str, ...]:
    """The warnings of a load. `problem`: the reason why Triton cannot compile kernels; empty if it can."""
    return (f"the Triton kernels are not used (slower): {problem}",) if problem else ()


def version() -> str:
    """The version of Triton, which some builds of torch install as a package with another name."""
    import triton

    return str(triton.__version__)


def versions(problem: str, sources: Path) -> Iterator[str]:
    """What the verdicts of a self-test depend on, besides torch, the GPU and its driver: Linux, Triton, and the Python
    files in the folder `sources`. `problem`: as in `warnings`."""
    yield platform.release()
    if not problem:
        yield version()
    yield sources_hash(sources)
