"""Metal kernels: their sources compiled as C++ and run with one thread a SIMD group, since there is no Metal in CI."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx", reason="mlx is not installed")

import mlx.core as mx

from localllm.kernels.metal import swiglu as op

HARNESS = """
#include <cmath>
#include <cstdint>
#include <cstdio>
using uint = uint32_t;
using std::exp;
using T = float;
constexpr uint INS = {ins}, OUTS = {outs}, CHOICES = {choices};
struct {{ uint x, y, z; }} thread_position_in_grid;
const uint thread_index_in_simdgroup = 0, threads_per_simdgroup = 1;
float simd_sum(float x) {{ return x; }}
template <class V> V* read(const char* name, size_t count) {{
  V* data = new V[count];
  FILE* file = fopen(name, "rb");
  if (!file || fread(data, sizeof(V), count, file) != count) throw name;
  return data;
}}
int main() {{
{reads}
  float* out = new float[{pairs} * OUTS];
  for (thread_position_in_grid.z = 0; thread_position_in_grid.z < {pairs}; thread_position_in_grid.z++)
    for (thread_position_in_grid.y = 0; thread_position_in_grid.y < OUTS; thread_position_in_grid.y++) {{
{source}
    }}
  fwrite(out, 4, {pairs} * OUTS, fopen("out", "wb"));
}}
"""


def emulated(folder: Path, x: np.ndarray, chosen: np.ndarray, gate: op.Experts, up: op.Experts) -> np.ndarray:
    tensors = dict(zip(op.INPUTS, (x, chosen.astype(np.uint32), *map(np.array, (*gate, *up))), strict=True))
    kinds = {"u": "uint", "f": "float"}
    reads = []
    for name, values in tensors.items():
        values.tofile(folder / name)
        reads.append(f'  auto {name} = read<{kinds[values.dtype.kind]}>("{name}", {values.size});')
    outs, (tokens, choices) = gate.weight.shape[1], chosen.shape
    code = HARNESS.format(
        ins=x.shape[1], outs=outs, choices=choices, pairs=tokens * choices, reads="\n".join(reads), source=op.SOURCE
    )
    (folder / "kernel.cpp").write_text(code)
    compiler = shutil.which("c++") or pytest.skip("no C++ compiler")
    subprocess.run([compiler, "-O1", "-o", "kernel", "kernel.cpp"], cwd=folder, check=True)
    subprocess.run(["./kernel"], cwd=folder, check=True)
    return np.fromfile(folder / "out", np.float32).reshape(tokens, choices, outs)


def experts(key: Any, count: int, outs: int, ins: int) -> op.Experts:
    return op.Experts(*mx.quantize(mx.random.normal((count, outs, ins), key=key) / ins**0.5, op.GROUP, op.BITS))


@pytest.mark.emulated
@pytest.mark.parametrize(("tokens", "choices", "outs", "ins"), [(1, 1, 8, 64), (3, 2, 16, 192), (5, 4, 40, 128)])
def test_swiglu_source_equals_the_reference(tmp_path: Path, tokens: int, choices: int, outs: int, ins: int) -> None:
    keys = mx.random.split(mx.random.key(tokens), 3)
    gate, up = experts(keys[0], 6, outs, ins), experts(keys[1], 6, outs, ins)
    x = mx.random.normal((tokens, ins), key=keys[2])
    chosen = np.random.default_rng(tokens).integers(0, 6, (tokens, choices))
    expected = np.array(op.reference(x, gate, up, mx.array(chosen)))
    found = emulated(tmp_path, np.array(x), chosen, gate, up)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
