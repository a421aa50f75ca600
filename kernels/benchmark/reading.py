"""A GPU kernel that reads memory once and only sums it: the bound of decode."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# (values per load of a program, loads, warps). The fastest shape depends on the GPU, so all are measured.
SHAPES = ((2048, 8, 4), (4096, 8, 8), (8192, 4, 8), (8192, 16, 16))


@triton.jit
def _sum(source, sums, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    places = source + program * BLOCK * TURNS + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for turn in tl.static_range(TURNS):
        total += tl.load(places + turn * BLOCK)
    tl.store(sums + program, tl.sum(total))


class Reader:
    """Reads a float32 buffer on a GPU. Its size is a multiple of 2^17 values; `shape` is one of SHAPES."""

    def __init__(self, buffer: Tensor, shape: tuple[int, int, int]) -> None:
        block, turns, warps = shape
        programs, rest = divmod(buffer.numel(), block * turns)
        assert not rest, "the buffer is not a multiple of block * turns values"
        self._sums = torch.empty(programs, dtype=torch.float32, device=buffer.device)

        def read() -> None:
            _sum[(programs,)](buffer, self._sums, BLOCK=block, TURNS=turns, num_warps=warps)

        self.read = read

    def total(self) -> float:
        """The sum of the buffer after `read`, to verify that the kernel read all values."""
        return float(self._sums.sum(dtype=torch.float64))
