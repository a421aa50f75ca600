"""Reading memory once and doing next to nothing with it: what decoding can be compared with on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# (values a program loads at a time, how often, warps): which is fastest depends on the GPU, so all are tried.
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
    """Reads a float32 buffer on a GPU, of a multiple of 2^17 values; `shape` is one of SHAPES."""

    def __init__(self, buffer: Tensor, shape: tuple[int, int, int]) -> None:
        block, turns, warps = shape
        programs, rest = divmod(buffer.numel(), block * turns)
        assert not rest, "all of the buffer is read"
        self._sums = torch.empty(programs, dtype=torch.float32, device=buffer.device)

        def read() -> None:
            _sum[(programs,)](buffer, self._sums, BLOCK=block, TURNS=turns, num_warps=warps)

        self.read = read

    def total(self) -> float:
        """Of everything, after a reading: shows that nothing was left out."""
        return float(self._sums.sum(dtype=torch.float64))
