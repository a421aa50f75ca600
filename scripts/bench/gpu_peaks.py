"""Measures the peak rates of a GPU. They bound the speed of kernels and steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from localllm.backends.cuda.bandwidth import ROUNDS, read_bandwidth, seconds

BUFFER = 4 * 2**30  # bytes, much larger than the caches
SIDE = 8192  # rows and columns of the matrices that are multiplied


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peak rates of a GPU, per second."""

    read: float  # bytes
    copy: float  # bytes read plus bytes written
    multiply: float  # bfloat16 operations; a multiply-add counts as two
    rounds: int = ROUNDS  # number of runs; each rate is the median of its runs

    def changes(self, before: Peaks) -> dict[str, float]:
        """The relative change of each rate since `before`."""
        return {
            "read": self.read / before.read - 1,
            "copy": self.copy / before.copy - 1,
            "multiply": self.multiply / before.multiply - 1,
        }


def peaks(size: int = BUFFER) -> Peaks:
    """Measure the peak rates of the current GPU on random numbers. Allocates `size` bytes and frees them."""
    try:
        return Peaks(read_bandwidth(size) or 0.0, _copy(size), _multiply())
    finally:
        torch.cuda.empty_cache()


def _copy(size: int) -> float:
    source = torch.randn(size // 8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def _multiply() -> float:
    matrices = torch.randn(2, SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    return 2 * SIDE**3 / seconds(lambda: torch.mm(matrices[0], matrices[1]))
