"""How CUDA C++ cuts products of few rows, over the shared memory of GPUs there are and smaller ones: compiled for the
host, so that no GPU is needed. A product either has a plan that fits, or the answer that it does not."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from localllm import kernels

from .emulation import compiler

FOLDER = Path(next(iter(kernels.__path__))) / "cuda"
PROGRAM = """
#include <cstdio>
#include "few_rows_plan.h"
using namespace localllm::cuda;
int main() {
  Traits formats[] = {BF16, WHOLE8, e4m3(false), e4m3(true), nibbles(false, 1), nibbles(false, 2), nibbles(false, 4),
                      nibbles(true, 1), nibbles(true, 2), nibbles(true, 4)};
  int shared, format, rows, outs, ins, group, gated, processors;
  while (scanf("%d %d %d %d %d %d %d %d", &shared, &format, &rows, &outs, &ins, &group, &gated, &processors) == 8) {
    const Traits& f = formats[format];
    const int64_t row = int64_t(ins) * (format == 0 ? 2 : 1), bytes = f.chunk == 128 ? (ins + 127) / 128 * 64 : row;
    Shape a{rows, outs, subs_of(f, ins, group).subs, group, (bytes + 15) / 16 * 16, gated > 0};
    const Limits gpu{processors, shared};
    const int pitch = own_pitch(f, a), at_once = rows_at_once(f, a, pitch, gpu);
    printf("%d %d %d", fits(f, a, false, gpu), fits(f, a, true, gpu), at_once);
    Cut cut{};
    int most = 0;
    for (int first = 0; at_once && first < rows; first += at_once) {
      Shape part = a;
      part.rows = std::min(at_once, rows - first);
      cut = cut_of(f, part, pitch, gpu);
      most = std::max(most, cut.fits() ? cut.shared : 1 << 30);
    }
    printf(" %d %d %d %d %d %d\\n", cut.j, cut.p, cut.nt, cut.slots, cut.tables, most);
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
SHAPES = [(8, 8), (29, 40), (77, 8192), (151936, 1024), (4096, 4096), (1000, 14336), (57344, 8192), (8192, 28672)]
ROWS = range(1, 17)


class Asked(NamedTuple):
    shared: int
    format: str
    rows: int
    outs: int
    ins: int
    gated: bool
    processors: int


class Plan(NamedTuple):
    fits: bool
    fits_normed: bool
    at_once: int
    j: int
    p: int
    nt: int
    slots: int
    tables: int
    bytes: int


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[Asked, Plan]:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "plan.cpp").write_text(PROGRAM)
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{FOLDER}", "-o", "plan", "plan.cpp"]
    subprocess.run([compiler(), *flags], cwd=folder, check=True)
    asked = list(every())
    lines = [
        f"{one.shared} {number} {one.rows} {one.outs} {one.ins} {group} {int(one.gated)} {one.processors}"
        for one in asked
        for number, group in [FORMATS[one.format]]
    ]
    told = subprocess.run(["./plan"], cwd=folder, check=True, input="\n".join(lines), text=True, capture_output=True)
    numbers = [[int(number) for number in line.split()] for line in told.stdout.splitlines()]
    return {one: Plan(*map(bool, own[:2]), *own[2:]) for one, own in zip(asked, numbers, strict=True)}


def every() -> Iterator[Asked]:
    for shared, format, rows, (outs, ins) in product(SHARED, FORMATS, ROWS, SHAPES):
        for gated in (False, True) if outs % 16 == 0 else (False,):
            yield Asked(shared, format, rows, outs, ins, gated, 132 if shared > 99 << 10 else 46)


def test_a_plan_fits_or_says_that_it_does_not(plans: dict[Asked, Plan]) -> None:
    for asked, plan in plans.items():
        assert plan.fits == (plan.at_once > 0), asked
        assert plan.fits or not plan.fits_normed, asked
        if plan.fits:
            assert plan.bytes <= asked.shared - 1024, asked
            assert 2 <= plan.slots <= 12, asked
            assert asked.rows <= 2 * plan.at_once, "weights are read no more than twice"
            assert plan.j > 1 or not asked.gated, "gates and what they gate are in one tile"
    assert any(not plan.fits for plan in plans.values()), "48 KB are too little for some"


def test_every_plan_has_its_kernel(plans: dict[Asked, Plan]) -> None:
    """As start_tiles in plan.cuh compiles them."""
    compiled = {}
    for format in FORMATS:
        many = format in ("bf16", "int8", "fp8", "fp8-128", "int4-128")
        for nt in (1, 2):
            deep = 2 if many and nt == 1 and format != "int4-128" else 1
            compiled[format, nt] = {(2, 1), (1, deep), *([(4, 1)] if many else [])}
    for asked, plan in plans.items():
        assert not plan.fits or (plan.j, plan.p) in compiled[asked.format, plan.nt], asked


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
def test_gpus_that_there_are_compute_every_format(plans: dict[Asked, Plan], shared: int) -> None:
    """99 KB have the GeForce RTX 30 to 50; 163 an A100, 227 an H100."""
    wide = {"int4-wide-32"} if shared == 99 << 10 else set()
    for asked, plan in plans.items():
        if asked.shared == shared and not asked.gated and not (asked.format in wide and asked.rows > 8):
            assert plan.fits, asked


def test_fewer_rows_fit_where_more_do(plans: dict[Asked, Plan]) -> None:
    for asked, plan in plans.items():
        if asked.rows > 1 and plan.fits:
            assert plans[asked._replace(rows=asked.rows - 1)].fits, asked


def test_where_memory_is_plenty_all_rows_are_computed_together(plans: dict[Asked, Plan]) -> None:
    for asked, plan in plans.items():
        if asked.shared == 227 << 10:
            assert plan.at_once == asked.rows, asked
