"""Programmatic dependent launch: a kernel starts while the previous kernel of the stream still runs.

A kernel that `overlapping` launches calls `follow_previous` before it reads results of an earlier kernel, and before
its first store. The next kernel starts after this wait: from its start, it may read the results of all kernels before
this one.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .nvidia.assembly import LAUNCH, WAIT


@triton.jit
def follow_previous(OVERLAP: tl.constexpr):
    """Waits until the previous kernel has ended, so that its stores are visible. Then permits the start of the next
    kernel, after all programs of this kernel called it."""
    if OVERLAP:
        tl.inline_asm_elementwise(WAIT, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise(LAUNCH, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


def overlapping(overlap: bool) -> dict[str, Any]:
    """The launch options of a kernel that may start before the previous kernel has ended."""
    return {"launch_pdl": True} if overlap else {}
