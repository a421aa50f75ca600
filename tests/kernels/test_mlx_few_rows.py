"""Products of few rows on MLX's CUDA device: on it, and elsewhere its source as C++, a thread for each of a block's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx", reason="mlx is not installed")

import mlx.core as mx

from localllm.kernels.mlx_cuda import few_rows as op

# What a warp multiplies together is exchanged between its threads, each of which holds the parts that PTX says.
HARNESS = """
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>
struct bfloat16 {
  uint16_t bits;
  explicit bfloat16(float x) {
    uint32_t wide;
    memcpy(&wide, &x, 4);
    bits = uint16_t((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
  bfloat16() = default;
};
struct uint4 { uint32_t x, y, z, w; };
uint4 __ldcs(const uint4* from) { return *from; }
uint4 __ldg(const uint4* from) { return *from; }
int min(int a, int b) { return a < b ? a : b; }
struct dim3 { int x; };
thread_local dim3 threadIdx, blockIdx;
std::barrier<> block(256);
void __syncthreads() { block.arrive_and_wait(); }
struct Warp {
  std::barrier<> together{32};
  uint32_t a[32][4], b[32][2];
} warps[8];
float half(uint32_t pair, int which) {
  const uint32_t wide = which ? pair & 0xffff0000 : pair << 16;
  float x;
  memcpy(&x, &wide, 4);
  return x;
}
void multiply(
    float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  Warp& warp = warps[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  const uint32_t a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  memcpy(warp.a[lane], a, 16);
  memcpy(warp.b[lane], b, 8);
  warp.together.arrive_and_wait();
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      const int from = k % 8 / 2;
      const uint32_t one = warp.a[row % 8 * 4 + from][row / 8 + k / 8 * 2], other = warp.b[column * 4 + from][k / 8];
      sum[i] += half(one, k % 2) * half(other, k % 2);
    }
  }
  warp.together.arrive_and_wait();
}
template <class V> V* read(const char* name, size_t count) {
  V* data = new V[count];
  FILE* file = fopen(name, "rb");
  if (!file || fread(data, sizeof(V), count, file) != count) throw name;
  return data;
}
using T = bfloat16;
#define __shared__ static
constexpr int TILES = {TILES}, PARTS = {PARTS}, SLICES = {SLICES};
const int x_ndim = 3, x_shape[3] = {1, {ROWS}, {INPUTS}}, w_shape[2] = {{OUTPUTS}, {INPUTS}};
void kernel(const T* x, const T* w, T* out) {
{SOURCE}
}
int main() {
  const T *x = read<T>("x", {ROWS} * {INPUTS}), *w = read<T>("w", {OUTPUTS} * {INPUTS});
  T* out = new T[{ROWS} * {OUTPUTS}];
  memset(out, 0xff, {ROWS} * {OUTPUTS} * 2);
  for (int at = 0; at < ({OUTPUTS} + {OUTS} - 1) / {OUTS}; at++) {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 256; thread++)
      threads.emplace_back([=] { threadIdx.x = thread, blockIdx.x = at; kernel(x, w, out); });
  }
  fwrite(out, 2, {ROWS} * {OUTPUTS}, fopen("out", "wb"));
}
"""


def numbers(rows: int, outputs: int, inputs: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    keys = mx.random.split(mx.random.key(rows + outputs + inputs), 2)
    x = mx.random.normal((1, rows, inputs), key=keys[0]).astype(dtype)
    return x, (mx.random.normal((outputs, inputs), key=keys[1]) / inputs**0.5).astype(dtype)


def check(found: mx.array, x: mx.array, weight: mx.array) -> None:
    expected = x.astype(mx.float32) @ weight.astype(mx.float32).T
    step = 2**-8 if x.dtype == mx.bfloat16 else 2**-11
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), np.array(expected), rtol=step, atol=1e-4)


SHAPES = [op.Shape(tiles, *others) for tiles in (1, 2, 4, 8) for others in ((1, 8), (2, 8), (2, 4))]
SHAPES += [op.Shape(tiles, 2, 2) for tiles in (4, 8)]


def test_every_shape_is_tried() -> None:
    found = {op.shape(rows, outputs) for rows in range(2, op.ROWS + 1) for outputs in (*range(8, 30_000, 56), 151_936)}
    assert found == set(SHAPES)
    assert all(8 * op.shape(rows, 1024).tiles >= rows for rows in range(2, op.ROWS + 1))


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("shape", "chunks"),
    [*((shape, 2 * shape.slices + 1) for shape in SHAPES), (SHAPES[0], 3)],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, op.Shape) else str(value),
)
def test_its_source_equals_the_reference(tmp_path: Path, shape: op.Shape, chunks: int) -> None:
    """Rows that leave part of the last tile, outputs that leave part of the last block, warps with one chunk more than
    others, or with none."""
    compiler = shutil.which("c++") or pytest.skip("no C++ compiler")
    rows, outputs, inputs = 8 * shape.tiles - 3, shape.outs + 9, op.CHUNK * chunks
    x, weight = numbers(rows, outputs, inputs, mx.bfloat16)
    for name, values in (("x", x), ("w", weight)):
        np.array(values.view(mx.uint16)).tofile(tmp_path / name)
    code = HARNESS.replace("{SOURCE}", op.SOURCE)
    sizes = {"ROWS": rows, "OUTPUTS": outputs, "INPUTS": inputs, "OUTS": shape.outs}
    for name, value in {**sizes, "TILES": shape.tiles, "PARTS": shape.parts, "SLICES": shape.slices}.items():
        code = code.replace(f"{{{name}}}", str(value))
    (tmp_path / "kernel.cpp").write_text(code)
    subprocess.run([compiler, "-std=c++20", "-O1", "-pthread", "-o", "kernel", "kernel.cpp"], cwd=tmp_path, check=True)
    subprocess.run(["./kernel"], cwd=tmp_path, check=True)
    bits = np.fromfile(tmp_path / "out", np.uint16).astype(np.uint32) << 16
    check(mx.array(bits.view(np.float32).reshape(1, rows, outputs)), x, weight)


@pytest.mark.skipif(not mx.cuda.is_available(), reason="MLX has no CUDA device here")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("rows", [2, 3, 7, 8, 9, 16, 17, 31, 33, 63, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (1000, 1024), (33, 128), (1024, 3072), (24_576, 384)])
def test_it_equals_the_reference(dtype: mx.Dtype, rows: int, outputs: int, inputs: int) -> None:
    x, weight = numbers(rows, outputs, inputs, dtype)
    assert op.fits(rows, inputs, (dtype, dtype))
    part = mx.concatenate([weight, weight])[outputs:]  # as projections of one input have theirs
    check(op.product(x, part, part.T), x, weight)


def test_what_does_not_fit_is_mlx_s_own() -> None:
    half = mx.float16
    for rows, inputs, dtype in ((1, 128, half), (65, 128, half), (8, 64, half), (8, 128, mx.float32)):
        x, weight = numbers(rows, 24, inputs, dtype)
        assert not op.fits(rows, inputs, (dtype, dtype))
        assert mx.array_equal(op.product(x, weight, weight.T), x @ weight.T)


@pytest.mark.real_otherdevice
def test_its_benchmark_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts" / "bench")
    import mlx_products
    from shapes import QWEN3_06B, TINY

    *layer, head = (outputs * inputs for outputs, inputs in mlx_products.products(QWEN3_06B).values())
    assert QWEN3_06B.layers * sum(layer) + head == QWEN3_06B.multiplied
    monkeypatch.setattr(mlx_products, "MOST_TURNS", 2)
    ceiling, *found = mlx_products.measure({"tiny": TINY}, [2, 8], 1, 2**20)
    assert ceiling["unit"] == "GB/s"
    assert len(found) == 10
    assert all(figure[part] > 0 for figure in found for part in ("ours", "peer", "host", "between", "bound_share"))
    x, weight = numbers(8, 24, 64, mx.bfloat16)
    with pytest.raises(SystemExit, match="wrong by"):
        mlx_products.looked_at(lambda x, own, turned: x @ own[::-1].T, x, mlx_products.Weight(weight, weight.T))
