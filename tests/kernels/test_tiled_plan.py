"""The thread blocks of tiled products. The plan is compiled for the host, so no GPU is needed."""

from __future__ import annotations

import subprocess
from itertools import product
from pathlib import Path

from localllm import kernels

from .emulation import compiler

FOLDER = Path(next(iter(kernels.__path__))) / "cuda"
PROGRAM = """
#include <cstdio>
#include "tiled_plan.h"
using namespace localllm::cuda;
int main() {
  int tiles, chunks, resident;
  while (scanf("%d %d %d", &tiles, &chunks, &resident) == 3) {
    const TiledBlocks blocks = blocks_of_product(tiles, chunks, resident);
    printf("%d %d\\n", blocks.blocks, blocks.sharers);
  }
}
"""
SIZES = list(product([1, 2, 5, 131, 132, 133, 264, 1002, 70000], [1, 2, 3, 18, 32, 112, 2000], [1, 28, 132, 528]))


def test_all_iterations_have_a_block(tmp_path: Path) -> None:
    (tmp_path / "plan.cpp").write_text(PROGRAM)
    program = tmp_path / "plan"
    subprocess.run([compiler(), "-std=c++20", f"-I{FOLDER}", tmp_path / "plan.cpp", "-o", program], check=True)
    text = "".join(f"{tiles} {chunks} {resident}\n" for tiles, chunks, resident in SIZES)
    lines = subprocess.run([program], input=text, capture_output=True, text=True, check=True).stdout.splitlines()
    for (tiles, chunks, resident), line in zip(SIZES, lines, strict=True):
        blocks, sharers = map(int, line.split())
        assert 1 <= sharers <= blocks <= resident
        rest = tiles % blocks * chunks  # the tiles that blocks share, as in Schedule
        starts = [min(block, sharers) * rest // sharers for block in range(blocks + 1)]
        assert starts[0] == 0
        assert starts[-1] == rest
        assert blocks * rest < 2**32, "the kernel computes the starts in 32 bits"
