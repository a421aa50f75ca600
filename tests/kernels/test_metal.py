"""The Metal kernel of rope and store. CI has no Metal: the test compiles the source as C++ and runs it thread by
thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")

import mlx.core as mx

from localllm.kernels.metal import rope_store as op

from .emulation import execute

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
TOLERANCES = {mx.float32: 2e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}


class Case(NamedTuple):
    """Arguments of the op; the rows begin at different columns."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    rope: op.Rope
    rows: int = 3
    columns: int = 32
    end: int = 30


CASES = {
    "qwen3": Case(16, 8, 128, 128, op.Rope(128, False, 1e6)),
    "many rows": Case(4, 2, 64, 64, op.Rope(64, False, 1e4), rows=40),
    "the first column": Case(4, 2, 64, 64, op.Rope(64, False, 1e4), rows=1, end=1),
    "the last column": Case(4, 2, 64, 64, op.Rope(64, False, 1e4), end=32),
    "part of a head": Case(7, 1, 80, 80, op.Rope(32, False, 1e4)),
    "neighbours": Case(6, 3, 96, 96, op.Rope(96, True, 1e4)),
    "neighbours, part": Case(6, 3, 96, 96, op.Rope(24, True, 1e4)),
    "slower positions": Case(4, 4, 64, 64, op.Rope(64, False, 1e4, 0.125)),
    "freqs": Case(4, 2, 64, 64, op.Rope(64, False, None, freqs=mx.array(7.0 ** np.arange(32) + 1.0, mx.float32))),
    "no turn": Case(4, 2, 16, 16, op.Rope(16, False, None, freqs=mx.array([1.0, 2.0] + [np.inf] * 6))),
    "short values": Case(4, 2, 64, 24, op.Rope(64, False, 1e4)),
    "long values": Case(4, 2, 32, 128, op.Rope(32, True, 1e4)),
}


class Given(NamedTuple):
    """The arguments of `reference`."""

    q: mx.array
    k: mx.array
    v: mx.array
    keys: mx.array
    values: mx.array
    padding: mx.array
    end: mx.array


def given(case: Case, dtype: Any) -> Given:
    """Queries, keys and values are views of a larger projection; all other columns are NaN."""
    rng = np.random.default_rng(case.heads + case.end)

    def new(heads: int, dim: int) -> mx.array:
        x = mx.array(rng.normal(size=(case.rows, 2, heads, dim)), dtype)
        return x[:, :1].transpose(0, 2, 1, 3)

    held = [mx.full((case.rows, case.kv_heads, case.columns, dim), np.nan, dtype) for dim in (case.dim, case.value_dim)]
    padding = [row * 13 % case.end for row in range(case.rows)]
    new_ones = new(case.heads, case.dim), new(case.kv_heads, case.dim), new(case.kv_heads, case.value_dim)
    return Given(*new_ones, *held, mx.array(padding, mx.int32), mx.array([case.end], mx.int32))


def plain(x: np.ndarray, rope: op.Rope, positions: np.ndarray) -> np.ndarray:
    """Rotated [rows, heads, 1, dim], in numpy."""
    half = rope.dims // 2
    speeds = rope.base ** -(np.arange(half) / half) if rope.freqs is None else 1 / np.array(rope.freqs, np.float64)
    angles = (positions * rope.scale)[:, None, None, None] * speeds
    places = np.arange(rope.dims).reshape(half, 2).T if rope.traditional else np.arange(rope.dims).reshape(2, half)
    one, other = x[..., places[0]], x[..., places[1]]
    turned = x.copy()
    turned[..., places[0]] = one * np.cos(angles) - other * np.sin(angles)
    turned[..., places[1]] = one * np.sin(angles) + other * np.cos(angles)
    return turned


def numbers(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def check(case: Case, asked: Given, found: op.Stored) -> None:
    tolerance = TOLERANCES[asked.q.dtype]
    assert {x.dtype for x in found} == {asked.q.dtype}
    positions = case.end - 1 - np.array(asked.padding)
    turned, key = (plain(numbers(x), case.rope, positions) for x in (asked.q, asked.k))
    np.testing.assert_allclose(numbers(found.queries), turned, rtol=0, atol=tolerance)
    for held, new, near in ((found.keys, key, tolerance), (found.values, numbers(asked.v), 0)):
        columns = numbers(held)
        np.testing.assert_allclose(columns[:, :, case.end - 1], new[:, :, 0], rtol=0, atol=near)
        assert np.isnan(np.delete(columns, case.end - 1, axis=2)).all(), "other columns are as they were"


HARNESS = """
#include <cmath>
using uint = uint32_t;
struct uint3 { uint x, y, z; };
namespace metal {
using std::exp2;
namespace fast {
using std::cos;
using std::sin;
}
}
#define device
int main() {
"""


def emulated(folder: Path, case: Case, asked: Given) -> op.Stored:
    """The arrays that the source writes. It runs thread by thread, with more threads than necessary."""
    kinds = {mx.float32: "float", mx.float16: "_Float16", mx.bfloat16: "bfloat16", mx.int32: "int32_t"}
    inputs = dict(zip(op.INPUTS, asked, strict=True))
    if case.rope.freqs is not None:
        inputs["freqs"] = case.rope.freqs
    body = [f"using T = {kinds[asked.q.dtype]};"]
    for name, x in inputs.items():
        new = name in ("q", "k", "v")  # heads lie together in what projections answer
        memory = mx.contiguous(x.transpose(0, 2, 1, 3) if new else x)
        np.array(memory.view(mx.uint16) if memory.itemsize == 2 else memory).tofile(folder / name)
        body.append(f'auto {name} = read<{kinds[x.dtype]}>("{name}", {x.size});')
        if x.ndim == 4:
            _, heads, columns, dim = x.shape
            body.append(f"const int64_t {name}_strides[] = {{{heads * columns * dim}, {columns * dim}, {dim}, 1}};")
    sizes = {"HEADS": case.heads, "KV_HEADS": case.kv_heads, "DIM": case.dim, "VALUE_DIM": case.value_dim}
    for name, size in (*sizes.items(), ("DIMS", case.rope.dims), ("TRADITIONAL", int(case.rope.traditional))):
        body.append(f"constexpr int {name} = {size};")
    body.append(f"T* out = new T[{asked.q.size}];")
    pairs, slots = max(case.dim, case.value_dim) // 2, case.heads + 2 * case.kv_heads
    body += [f"for (uint z = 0; z < {case.rows}; z++)", f"for (uint y = 0; y < {slots + 3}; y++)"]
    body += [f"for (uint x = 0; x < {pairs}; x++) [&](uint3 thread_position_in_grid) {{"]
    body += [op.METAL, op.source(case.rope), "}(uint3{x, y, z});"]
    outs = {"out": asked.q, "keys": asked.keys, "values": asked.values}
    body += [f'fwrite({name}, sizeof(T), {x.size}, fopen("{name}", "wb"));' for name, x in outs.items()]
    execute(HARNESS + "\n".join(body) + "\n}\n", folder, "-fsanitize=address,undefined")

    def told(name: str, like: mx.array) -> mx.array:
        kind = np.uint16 if like.itemsize == 2 else np.uint32
        return mx.array(np.fromfile(folder / name, kind)).view(like.dtype).reshape(like.shape)

    return op.Stored(*(told(name, x) for name, x in outs.items()))


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_rope_store_source_writes_one_column(tmp_path: Path, name: str, dtype: str) -> None:
    asked = given(CASES[name], DTYPES[dtype])
    check(CASES[name], asked, emulated(tmp_path, CASES[name], asked))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_the_reference_equals_numpy(name: str, dtype: str) -> None:
    asked = given(CASES[name], DTYPES[dtype])
    store = op.store_for(asked.q, asked.keys, asked.values, CASES[name].rope)
    check(CASES[name], asked, store(*asked))


def test_supported_shapes_of_the_kernel() -> None:
    def fits(dtypes: Any, dims: tuple[int, int], turned: int) -> bool:
        return op.fits(dims, dtypes, op.Rope(turned, False, 1e4))

    assert fits([mx.bfloat16] * 3, (128, 128), 128)
    assert fits([mx.float32] * 3, (64, 512), 32)
    assert not fits([mx.bfloat16, mx.float16, mx.float16], (128, 128), 128)
    assert not fits([mx.bfloat16] * 3, (128, 1024), 128)
    assert not fits([mx.bfloat16] * 3, (128, 128), 256)
    assert not fits([mx.int32] * 3, (128, 128), 128)


def test_the_launch_covers_all_heads_and_writes_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in replaces Metal. The kernel must write a strided cache and not a contiguous copy of it."""
    made, launched = list[dict[str, Any]](), list[dict[str, Any]]()

    def metal_kernel(*_: Any, **options: Any) -> Any:
        made.append(options)
        return lambda **arguments: launched.append(arguments) or [arguments["inputs"][0]]

    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    asked = given(CASES["part of a head"], mx.float32)
    found = op.compiled_store(asked.q, asked.keys, asked.values, op.Rope(32, False, 77.0))(*asked)
    assert made == [{"ensure_row_contiguous": False}]
    assert launched[0]["grid"] == (40, 7 + 2 * 1, 3)
    assert found.keys is asked.keys
    assert found.values is asked.values
