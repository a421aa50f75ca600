"""The rate of a bf16 product of 8192 x 8192 x 8192 with the instructions of compute capability 8.0 (`mma.sync`).

`python scripts/bench/mma_product.py`. GPUs of later architectures execute these instructions too. The rate is the bound
of prefill attention with `mma.sync` (LOCALLLM_DEV_CUDA_CAPABILITY=8.0). Triton compiles the kernel to PTX for 8.0, and
from PTX to machine code for this GPU. The fastest of several tiles counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ["TRITON_OVERRIDE_ARCH"] = "sm80"  # before the import of Triton

import torch
import triton
import triton.language as tl
from rows import Row, parser, row, save
from triton.backends.nvidia.compiler import CUDABackend

from localllm.backends.cuda.bandwidth import ROUNDS, seconds

SIZE = 8192
GROUP = 8  # rows of tiles that run side by side, so that they find their inputs in the L2 cache
TILES = [(128, 256, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 32, 4, 4), (128, 128, 64, 8, 3)]  # …, warps, stages


@triton.jit
def _product(a, b, out, SIZE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr):
    """out = a bᵀ; all three are [SIZE, SIZE]."""
    tile = tl.program_id(0)
    columns: tl.constexpr = SIZE // N
    first = tile // (GROUP * columns) * GROUP
    row = first + tile % (GROUP * columns) % GROUP
    column = tile % (GROUP * columns) // GROUP
    rows = row * M + tl.arange(0, M)
    outputs = column * N + tl.arange(0, N)
    inputs = tl.arange(0, K)
    left = a + rows[:, None] * SIZE + inputs[None, :]
    right = b + outputs[None, :] * SIZE + inputs[:, None]
    total = tl.zeros([M, N], tl.float32)
    for _ in range(0, SIZE, K):
        total = tl.dot(tl.load(left), tl.load(right), total)
        left += K
        right += K
    tl.store(out + rows[:, None] * SIZE + outputs[None, :], total.to(tl.bfloat16))


def measure() -> Iterator[Row]:
    _assemble_for_this_gpu()
    a, b = torch.randn(2, SIZE, SIZE, device="cuda").bfloat16()
    out = torch.empty_like(a)
    rates: dict[str, float] = {}
    for m, n, k, warps, stages in TILES:
        grid = (SIZE // m * (SIZE // n),)

        def call() -> None:
            _product[grid](a, b, out, SIZE, m, n, k, GROUP, num_warps=warps, num_stages=stages)  # noqa: B023

        rates[f"{m} x {n} x {k}"] = 2.0 * SIZE**3 / seconds(call)
        torch.testing.assert_close(out, a @ b.t(), rtol=2e-2, atol=1.0)
    best = max(rates, key=rates.__getitem__)
    device = torch.cuda.get_device_name()
    yield row("bf16 product of 8192³, mma.sync", rates[best] / 1e12, "TFLOP/s", device=device, tile=best, rounds=ROUNDS)


def _assemble_for_this_gpu() -> None:
    """Make Triton assemble its PTX for the GPU of this machine, although the PTX is for 8.0."""
    major, minor = torch.cuda.get_device_capability()
    assemble = CUDABackend.make_cubin

    def make_cubin(self: Any, source: Any, metadata: Any, options: Any, capability: int) -> Any:
        return assemble(self, source, metadata, options, 10 * major + minor)

    CUDABackend.make_cubin = make_cubin


if __name__ == "__main__":
    parser(__doc__).parse_args()
    save("cuda_attention", measure(), part=True)
