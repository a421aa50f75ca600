"""The memory layout of the kernel that computes all layers of a decode step, for the shared memory of real GPUs and
of smaller ones. The plan is compiled for the host, so no GPU is needed."""

from __future__ import annotations

import subprocess
from itertools import product
from pathlib import Path

from localllm import kernels

from .compiler import compiler

FOLDER = Path(next(iter(kernels.__path__))) / "cuda"
RUNTIME = """
#pragma once
#define __host__
#define __device__
using cudaStream_t = void*;
"""
PROGRAM = """
#include <cstdio>
#include "step/plan.cuh"
using namespace localllm::cuda;
int main() {
  int shared, layers, hidden, inner, heads, kv_heads, dim, blocks;
  while (scanf("%d %d %d %d %d %d %d %d", &shared, &layers, &hidden, &inner, &heads, &kv_heads, &dim, &blocks) == 8) {
    StepArgs args{};
    args.layer_count = layers, args.hidden = hidden, args.inner = inner;
    args.heads = heads, args.kv_heads = kv_heads, args.dim = dim;
    const Plan plan(args, blocks, shared);
    printf("%d %d %d\\n", plan.stages, plan.in_flight, plan.ring + plan.stages * STAGE);
  }
}
"""
SHARED = [48 << 10, 64 << 10, 99 << 10, 163 << 10, 227 << 10]
SHAPES = [
    (28, 1024, 3072, 16, 8, 128),
    (2, 256, 192, 8, 2, 64),
    (80, 8192, 28672, 64, 8, 128),
    (3, 640, 320, 3, 3, 128),
]


def test_a_step_fits_or_the_plan_reports_that_it_does_not(tmp_path: Path) -> None:
    """With only one stage of the ring a step does not fit (step_fits in kernels/cuda/step/step.cu)."""
    (tmp_path / "cuda_runtime.h").write_text(RUNTIME)
    (tmp_path / "plan.cpp").write_text(PROGRAM)
    flags = ["-std=c++17", f"-I{tmp_path}", f"-I{FOLDER}", "-o", "plan", "plan.cpp"]
    subprocess.run([compiler(), *flags], cwd=tmp_path, check=True)
    requests = [(shared, *shape, 132) for shared, shape in product(SHARED, SHAPES)]
    lines = "\n".join(" ".join(map(str, one)) for one in requests)
    output = subprocess.run(["./plan"], cwd=tmp_path, check=True, input=lines, text=True, capture_output=True).stdout
    plans = {one: tuple(map(int, line.split())) for one, line in zip(requests, output.splitlines(), strict=True)}
    for (shared, *_), (stages, at_once, size) in plans.items():
        assert stages in (0, 1, 2, 4, 8)
        assert stages <= 1 or size <= shared
        assert stages <= 1 or 1 <= at_once <= stages
    fits = {shared: sum(stages > 1 for (one, *_), (stages, *_) in plans.items() if one == shared) for shared in SHARED}
    assert fits[48 << 10] < fits[99 << 10] < fits[227 << 10] == len(SHAPES)
