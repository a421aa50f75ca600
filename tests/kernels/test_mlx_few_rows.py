"""Products of few rows on MLX's CUDA device: on it, and elsewhere its source as C++, a thread for each of a block's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx", reason="mlx is not installed")

import mlx.core as mx

from localllm.kernels.mlx_cuda import few_rows as op

from . import warps

CODE = """
constexpr int TILES = {TILES}, PARTS = {PARTS}, SLOTS = {SLOTS};
uint4 shared[{SHARED} / 16];
const int x_ndim = 3, x_shape[3] = {1, {ROWS}, {INPUTS}}, w_shape[2] = {{OUTPUTS}, {INPUTS}};
void kernel(const T* x, const T* w, T* out) {
{SOURCE}
}
int main() {
  const T *x = read<T>("x", {ROWS} * {INPUTS}), *w = read<T>("w", {OUTPUTS} * {INPUTS});
  T* out = poisoned<T>({ROWS} * {OUTPUTS});
  memset(shared, 0xff, {SHARED});
  launch(({OUTPUTS} + {OUTS} - 1) / {OUTS}, 1, 256, [=] { kernel(x, w, out); });
  save("out", out, {ROWS} * {OUTPUTS});
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


SHAPES = [op.Shape(tiles, parts) for tiles in (1, 2) for parts in op.PARTS]


def test_every_shape_is_tried() -> None:
    found = {op.shape(rows, outputs) for rows in range(2, op.ROWS + 1) for outputs in range(8, 40_000, 56)}
    assert found == set(SHAPES)
    assert all(8 * op.shape(rows, 1024).tiles >= rows for rows in range(2, op.ROWS + 1))
    assert [op.shape(8, outputs).parts for outputs in (1024, 4096, 5120, 6144, 9728)] == [1, 2, 3, 3, 3]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copies_and_sums_find_room(shape: op.Shape) -> None:
    assert shape.slots >= 3
    assert shape.slots * 16 * op.THREADS * (2 * shape.parts + shape.tiles) <= op.SHARED <= 99 * 2**10
    assert op.WARPS * shape.parts * shape.tiles * 4 * 32 * 4 <= op.SHARED


@pytest.mark.emulated
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rounds", [0, 1])
def test_its_source_equals_the_reference(tmp_path: Path, shape: op.Shape, rounds: int) -> None:
    """Rows that leave part of the last tile, outputs that leave part of the last block, warps with one chunk more than
    others, or with none, and slots that are filled again, or never."""
    chunks = 3 + op.WARPS * rounds * shape.slots
    rows, outputs, inputs = 8 * shape.tiles - 3, 16 * shape.parts + 9, op.CHUNK * chunks
    x, weight = numbers(rows, outputs, inputs, mx.bfloat16)
    sizes = {"ROWS": rows, "OUTPUTS": outputs, "INPUTS": inputs, "OUTS": 16 * shape.parts, "SHARED": op.SHARED}
    constants = {**sizes, "TILES": shape.tiles, "PARTS": shape.parts, "SLOTS": shape.slots}
    source = op.SOURCE.replace("extern __shared__", "extern")
    warps.run(CODE, {**constants, "SOURCE": source}, {"x": x, "w": weight}, tmp_path, "-fsanitize=address,undefined")
    check(warps.bf16(tmp_path / "out").reshape(1, rows, outputs), x, weight)


@pytest.mark.skipif(not mx.cuda.is_available(), reason="MLX has no CUDA device here")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("rows", [2, 3, 7, 8, 9, 15, 16])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (1000, 1024), (33, 32), (1024, 3072), (24_576, 384)])
def test_it_equals_the_reference(dtype: mx.Dtype, rows: int, outputs: int, inputs: int) -> None:
    x, weight = numbers(rows, outputs, inputs, dtype)
    assert op.fits(rows, inputs, (dtype, dtype))
    part = mx.concatenate([weight, weight])[outputs:]  # as projections of one input have theirs
    check(op.product(x, part, part.T), x, weight)


def test_what_does_not_fit_is_mlx_s_own() -> None:
    half = mx.float16
    for rows, inputs, dtype in ((1, 128, half), (17, 128, half), (8, 48, half), (8, 128, mx.float32)):
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
