"""The thread blocks of tiled products. The plan is compiled for the host, so no GPU is needed."""

from __future__ import annotations

import subprocess
from itertools import product
from pathlib import Path

from localllm import kernels

from .compiler import compiler

FOLDER = Path(next(iter(kernels.__path__))) / "cuda"
PROGRAM = """
#include <cstdio>
#include "products/tiled/plan.h"
using namespace localllm::cuda;
int main() {
  int tiles, chunks, resident, cost;
  while (scanf("%d %d %d %d", &tiles, &chunks, &resident, &cost) == 4) {
    const TiledBlocks blocks = blocks_of_product(tiles, chunks, resident, cost, cost > 0);
    printf("%d %d %d\\n", blocks.blocks, blocks.sharers, blocks.split);
  }
}
"""
TILES = 1, 2, 5, 32, 64, 131, 132, 133, 264, 1002, 70000
SIZES = list(product(TILES, [1, 2, 3, 18, 32, 112, 2000], [1, 28, 132, 528], [0, 11, 27]))


def plans(tmp_path: Path, sizes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """(blocks, sharers, split) of each of `sizes`: tiles, chunks, resident blocks, cost of the sum of parts."""
    (tmp_path / "plan.cpp").write_text(PROGRAM)
    program = tmp_path / "plan"
    subprocess.run([compiler(), "-std=c++20", f"-I{FOLDER}", tmp_path / "plan.cpp", "-o", program], check=True)
    text = "".join(f"{' '.join(map(str, size))}\n" for size in sizes)
    lines = subprocess.run([program], input=text, capture_output=True, text=True, check=True).stdout.splitlines()
    return [tuple(map(int, line.split())) for line in lines]


def test_all_iterations_have_a_block(tmp_path: Path) -> None:
    for (tiles, chunks, resident, cost), (blocks, sharers, split) in zip(SIZES, plans(tmp_path, SIZES), strict=True):
        assert 1 <= sharers <= blocks <= resident
        assert split == 1 or cost > 0
        rest = tiles % blocks * chunks  # the tiles that blocks share, as in Schedule
        if split > 1:
            assert blocks == sharers == tiles * split
            assert split <= chunks
        starts = [min(block, sharers) * rest // sharers for block in range(blocks + 1)]
        assert starts[0] == 0
        assert starts[-1] == rest
        assert blocks * rest < 2**32, "the kernel computes the starts in 32 bits"


def test_plan_is_the_fastest_of_an_h200(tmp_path: Path) -> None:
    sizes = {
        (48, 32, 132, 11): (96, 96, 2),  # a cluster per tile
        (32, 112, 132, 11): (132, 132, 1),  # few tiles: all blocks share them
        (96, 32, 132, 27): (96, 96, 1),  # a block per tile
        (192, 32, 132, 27): (132, 60, 1),  # a second wave without shared tiles
        (133, 112, 132, 11): (132, 28, 1),  # all blocks share one tile
        (48, 32, 132, 0): (132, 132, 1),  # mma.sync
    }
    assert dict(zip(sizes, plans(tmp_path, list(sizes)), strict=True)) == sizes
