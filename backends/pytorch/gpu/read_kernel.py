"""A GPU kernel that reads a buffer once and sums it. Its speed is the read bandwidth, which bounds decode."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# (values per load, loads of a program, warps of a program). The fastest shape depends on the GPU, so all are measured.
SHAPES = ((2048, 8, 4), (4096, 8, 8), (8192, 4, 8), (8192, 16, 16))


@triton.jit
def _sum(source, sums, BLOCK: tl.constexpr, LOADS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    addresses = source + program * BLOCK * LOADS + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for load in tl.static_range(LOADS):
        total += tl.load(addresses + load * BLOCK)
    tl.store(sums + program, tl.sum(total))


class Reader:
    """Reads a float32 buffer on a GPU. The buffer has a multiple of 2^17 values; `shape` is one of SHAPES."""

    def __init__(self, buffer: Tensor, shape: tuple[int, int, int]) -> None:
        self._buffer = buffer
        self._block, self._loads, self._warps = shape
        programs, remainder = divmod(buffer.numel(), self._block * self._loads)
        assert not remainder, "the buffer is not a multiple of block * loads values"
        self._sums = torch.empty(programs, dtype=torch.float32, device=buffer.device)

    def read(self) -> None:
        """Read the whole buffer. The launch is asynchronous."""
        _sum[(len(self._sums),)](self._buffer, self._sums, BLOCK=self._block, LOADS=self._loads, num_warps=self._warps)

    def total(self) -> float:
        """The sum of the buffer after `read`; a test compares it with the expected sum."""
        return float(self._sums.sum(dtype=torch.float64))
