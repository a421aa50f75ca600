"""The tile sizes of small-batch products, for the shared memory of real GPUs and of smaller ones. The plan is compiled
for the host, so no GPU is needed. Every product has a plan that fits, or the plan reports that none fits."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from localllm import kernels

from .compiler import compiler

FOLDER = Path(next(iter(kernels.__path__))) / "cuda"
PROGRAM = """
#include <cstdio>
#include "products/small_batch/plan.h"
using namespace localllm::cuda;
int main() {
  Traits formats[] = {BF16, INT8, e4m3(false), e4m3(true), nibbles(false, 1), nibbles(false, 2), nibbles(false, 4),
                      nibbles(true, 1), nibbles(true, 2), nibbles(true, 4)};
  int shared, format, rows, n, k, group, gated, processors;  // n outputs, k inputs
  while (scanf("%d %d %d %d %d %d %d %d", &shared, &format, &rows, &n, &k, &group, &gated, &processors) == 8) {
    const Traits& f = formats[format];
    const int64_t row = int64_t(k) * (format == 0 ? 2 : 1), bytes = f.chunk == 128 ? (k + 127) / 128 * 64 : row;
    Shape a{rows, n, subgroups_of(f, k, group).subgroups, group, (bytes + 15) / 16 * 16, gated > 0};
    const Limits gpu{processors, shared};
    const int pitch = prepared_pitch(f, a), launch_rows = rows_per_launch(f, a, pitch, gpu);
    printf("%d %d %d", fits(f, a, false, gpu), fits(f, a, true, gpu), launch_rows);
    TileSizes sizes{};
    int max_shared = 0;
    for (int first = 0; launch_rows && first < rows; first += launch_rows) {
      Shape batch = a;
      batch.rows = std::min(launch_rows, rows - first);
      sizes = tile_sizes(f, batch, pitch, gpu);
      max_shared = std::max(max_shared, sizes.fits() ? sizes.shared : 1 << 30);
    }
    printf(" %d %d %d %d %d %d\\n", sizes.j, sizes.p, sizes.nt, sizes.slots, sizes.sum_buffers, max_shared);
  }
}
"""

FORMATS = {
    "bf16": (0, 1 << 30),
    "int8": (1, 1 << 30),
    "fp8": (2, 1 << 30),
    "fp8-128": (3, 128),
    "int4-128": (4, 128),
    "int4-64": (5, 64),
    "int4-32": (6, 32),
    "int4-wide-128": (7, 128),
    "int4-wide-64": (8, 64),
    "int4-wide-32": (9, 32),
}
SHARED = [48 << 10, 64 << 10, 99 << 10, 163 << 10, 227 << 10]
# (out_features, in_features, gated) of bf16 products of one row -> blocks of 8 outputs in the fastest tile on an H100
FASTEST_TILES = {(128, 2048, False): 1, (5120, 2048, False): 2, (3072, 2048, False): 4, (6144, 1024, True): 4}
SHAPES = [
    *(shape[:2] for shape in FASTEST_TILES),
    (8, 8),
    (29, 40),
    (77, 8192),
    (151936, 1024),
    (4096, 4096),
    (1000, 14336),
    (57344, 8192),
    (8192, 28672),
]
ROWS = range(1, 17)


class Shape(NamedTuple):
    shared: int
    format: str
    rows: int
    out_features: int
    in_features: int
    gated: bool
    processors: int


class Plan(NamedTuple):
    fits: bool
    fits_normed: bool
    launch_rows: int
    j: int
    p: int
    nt: int
    slots: int
    sum_buffers: int
    bytes: int


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[Shape, Plan]:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "plan.cpp").write_text(PROGRAM)
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{FOLDER}", "-o", "plan", "plan.cpp"]
    subprocess.run([compiler(), *flags], cwd=folder, check=True)
    shapes = list(all_shapes())
    lines = [
        f"{s.shared} {number} {s.rows} {s.out_features} {s.in_features} {group} {int(s.gated)} {s.processors}"
        for s in shapes
        for number, group in [FORMATS[s.format]]
    ]
    output = subprocess.run(["./plan"], cwd=folder, check=True, input="\n".join(lines), text=True, capture_output=True)
    numbers = [[int(number) for number in line.split()] for line in output.stdout.splitlines()]
    return {one: Plan(*map(bool, row[:2]), *row[2:]) for one, row in zip(shapes, numbers, strict=True)}


def all_shapes() -> Iterator[Shape]:
    for shared, format, rows, (out_features, in_features) in product(SHARED, FORMATS, ROWS, SHAPES):
        for gated in (False, True) if out_features % 16 == 0 else (False,):
            yield Shape(shared, format, rows, out_features, in_features, gated, 132 if shared > 99 << 10 else 46)


def test_plan_fits_or_reports_that_none_fits(plans: dict[Shape, Plan]) -> None:
    for shape, plan in plans.items():
        assert plan.fits == (plan.launch_rows > 0), shape
        assert plan.fits or not plan.fits_normed, shape
        if plan.fits:
            assert plan.bytes <= shape.shared - 1024, shape
            assert 2 <= plan.slots <= 12, shape
            assert shape.rows <= 2 * plan.launch_rows, "weights are read no more than twice"
            assert plan.j > 1 or not shape.gated, "a gate and the value it multiplies are in one tile"
    assert any(not plan.fits for plan in plans.values()), "48 KB are too small for some shapes"


@pytest.mark.parametrize("shape", FASTEST_TILES)
def test_the_fastest_tiles_are_chosen(plans: dict[Shape, Plan], shape: tuple[int, int, bool]) -> None:
    out_features, in_features, gated = shape
    plan = plans[Shape(227 << 10, "bf16", 1, out_features, in_features, gated, 132)]
    assert plan.j == FASTEST_TILES[shape]


def test_every_plan_has_a_compiled_kernel(plans: dict[Shape, Plan]) -> None:
    """The kernels that start_tiles (kernels/cuda/products/small_batch/launch.cuh) compiles."""
    compiled = {}
    for format in FORMATS:
        many = format in ("bf16", "int8", "fp8", "fp8-128", "int4-128")
        for nt in (1, 2):
            deep = 2 if many and nt == 1 and format != "int4-128" else 1
            compiled[format, nt] = {(2, 1), (1, deep), *([(4, 1)] if many else [])}
    for shape, plan in plans.items():
        assert not plan.fits or (plan.j, plan.p) in compiled[shape.format, plan.nt], shape


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
def test_real_gpus_support_every_format(plans: dict[Shape, Plan], shared: int) -> None:
    """99 KB: GeForce RTX 30 to 50; 163 KB: A100; 227 KB: H100."""
    wide = {"int4-wide-32"} if shared == 99 << 10 else set()
    for shape, plan in plans.items():
        if shape.shared == shared and not shape.gated and not (shape.format in wide and shape.rows > 8):
            assert plan.fits, shape


def test_fewer_rows_fit_if_more_rows_fit(plans: dict[Shape, Plan]) -> None:
    for shape, plan in plans.items():
        if shape.rows > 1 and plan.fits:
            assert plans[shape._replace(rows=shape.rows - 1)].fits, shape


def test_large_shared_memory_computes_all_rows_in_one_launch(plans: dict[Shape, Plan]) -> None:
    for shape, plan in plans.items():
        if shape.shared == 227 << 10:
            assert plan.launch_rows == shape.rows, shape
