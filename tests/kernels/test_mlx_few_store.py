"""Rope of few tokens with new caches that hold them, on MLX's CUDA device: on it, and elsewhere its source as C++."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")

import mlx.core as mx

from localllm.kernels.metal.rope_store import INPUTS, Rope, Stored, reference
from localllm.kernels.mlx_cuda import few_store as op

from . import warps
from .test_mlx_rope_store import DTYPES, TOLERANCES

CODE = """
using std::cos, std::exp2, std::sin;
constexpr int DIM = {DIM}, DIMS = {DIMS};
constexpr bool TRADITIONAL = {TRADITIONAL};
{SHAPES}
void kernel(const T* q, const T* k, const T* v, const T* keys, const T* values, const int* padding, const int* ends,
            const float* freqs, T* turned, T* new_keys, T* new_values) {
{SOURCE}
}
int main() {
  const T* new_ones = read<T>("new", {NEW});
  const T *held_keys = read<T>("keys", {HELD}), *held_values = read<T>("values", {HELD});
  const int *padding = read<int>("padding", {ROWS}), *ends = read<int>("ends", 1);
  const float* freqs = read<float>("freqs", {FREQS});
  T *turned = poisoned<T>({QUERIES}), *new_keys = poisoned<T>({CACHED}), *new_values = poisoned<T>({CACHED});
  launch(({THREADS} + 255) / 256, 1, 256, [=] {
    kernel({GIVEN}, padding, ends, freqs, turned, new_keys, new_values);
  });
  save("turned", turned, {QUERIES});
  save("new_keys", new_keys, {CACHED});
  save("new_values", new_values, {CACHED});
}
"""


class Case(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    rope: Rope
    new: int
    end: int
    columns: int
    rows: int = 1

    @property
    def start(self) -> int:
        return self.end - self.new

    def memory(self, kind: Callable[[np.ndarray], np.ndarray]) -> dict[str, np.ndarray]:
        """Of new ones as a joined projection answers them, of a `kind` that is made of float32; of caches that are part
        of something larger, any bits at all."""
        rng, heads = np.random.default_rng(self.end + self.new), self.heads + 2 * self.kv_heads
        new = kind(rng.normal(size=(self.rows, self.new, heads, self.dim)).astype(np.float32))
        held = (self.rows + 1, self.kv_heads + 2, self.columns + 5, self.dim)
        bits = (rng.integers(0, 256, (*held[:3], self.dim * new.itemsize), np.uint8).view(new.dtype) for _ in "kv")
        return {"new": new, **dict(zip(("keys", "values"), bits, strict=True))}

    def views(self, new: Any, keys: Any, values: Any) -> tuple[Any, ...]:
        """What the op is given of such memory, arrays of numpy or of MLX."""
        bounds = (0, self.heads, self.heads + self.kv_heads, self.heads + 2 * self.kv_heads)
        parts = (new[:, :, one:other].swapaxes(1, 2) for one, other in pairwise(bounds))
        return *parts, *(x[1:, 1:-1, 3 : 3 + self.columns] for x in (keys, values))

    @property
    def padding(self) -> list[int]:
        """Rows that began at different columns; some with what is new."""
        return [row * 13 % (self.start + 1) for row in range(self.rows)]

    @property
    def own(self) -> slice:
        return slice(self.start, self.end)


def freqs(count: int) -> mx.array:
    return mx.array(7.0 ** np.arange(count) + 1.0, mx.float32)


CASES = {
    "a hit": Case(16, 8, 128, Rope(128, False, 1e6), 16, 40, 48),
    "one token": Case(4, 2, 64, Rope(64, False, 1e4), 1, 21, 21, rows=2),
    "rows of their own length": Case(4, 2, 64, Rope(64, False, 1e4), 7, 60, 64, rows=3),
    "new rows": Case(6, 2, 64, Rope(64, False, 1e4), 9, 9, 13, rows=2),
    "many tokens": Case(3, 1, 64, Rope(64, False, 1e4), 63, 90, 96, rows=2),
    "part of a head": Case(7, 1, 80, Rope(40, False, 1e4), 5, 30, 32, rows=2),
    "pairs across reads": Case(2, 2, 80, Rope(36, False, 1e4), 3, 19, 24),
    "neighbours": Case(6, 3, 96, Rope(96, True, 1e4), 11, 33, 40, rows=2),
    "neighbours, part": Case(6, 3, 96, Rope(26, True, 1e4), 4, 33, 40),
    "slower positions": Case(4, 4, 64, Rope(64, False, 1e4, 0.125), 5, 300, 304),
    "freqs": Case(4, 2, 64, Rope(64, False, None, freqs=freqs(32)), 13, 40, 41, rows=3),
    "freqs of a part, neighbours": Case(4, 1, 48, Rope(24, True, None, 0.5, freqs(12)), 6, 20, 24),
}


def told(case: Case, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return *given, mx.array(case.padding, mx.int32), mx.array([case.end], mx.int32)


def expected(case: Case, given: tuple[mx.array, ...]) -> Stored:
    """In float32, from float32."""
    return reference(*told(case, tuple(x.astype(mx.float32) for x in given)), case.rope)


def whole(bits: np.ndarray) -> np.ndarray:
    """bf16 as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def emulated(folder: Path, case: Case) -> tuple[np.ndarray, ...]:
    """Bits of queries, keys and values that the source finds, which was given bits."""
    memory = case.memory(lambda x: np.array(mx.array(x).astype(mx.bfloat16).view(mx.uint16)))
    shapes, given = list[str](), list[str]()
    for name, x in zip(INPUTS, case.views(**memory), strict=False):
        held = "new" if name in "qkv" else name
        start = x.__array_interface__["data"][0] - memory[held].__array_interface__["data"][0]
        given.append(f"{'new_ones' if held == 'new' else 'held_' + held} + {start // 2}")
        strides = (stride // 2 for stride in x.strides)
        shapes.append(f"const int {name}_shape[4] = {{{', '.join(map(str, x.shape))}}};")
        shapes.append(f"const int64_t {name}_strides[4] = {{{', '.join(map(str, strides))}}};")
    own = mx.zeros(1) if case.rope.freqs is None else case.rope.freqs
    asked = (case.rows, case.heads, case.new, case.dim), (case.rows, case.kv_heads, case.columns, case.dim)
    parts = {
        "DIM": case.dim,
        "DIMS": case.rope.dims,
        "TRADITIONAL": str(case.rope.traditional).lower(),
        "SHAPES": "\n".join(shapes),
        "SOURCE": op.source(case.rope),
        "NEW": memory["new"].size,
        "HELD": memory["keys"].size,
        "ROWS": case.rows,
        "FREQS": own.size,
        "QUERIES": np.prod(asked[0]),
        "CACHED": np.prod(asked[1]),
        "THREADS": op.threads(*asked),
        "GIVEN": ", ".join(given),
    }
    places = dict(zip(("padding", "ends"), told(case, ()), strict=True))
    arrays = {name: mx.array(x) for name, x in memory.items()} | places | {"freqs": own}
    warps.run(CODE, parts, arrays, folder, "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    shaped = zip(op.OUTPUTS, (asked[0], asked[1], asked[1]), strict=True)
    return tuple(np.fromfile(folder / name, np.uint16).reshape(shape) for name, shape in shaped)


@pytest.mark.emulated
@pytest.mark.parametrize("name", CASES)
def test_its_source_equals_the_reference(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    queries, *caches = emulated(tmp_path, case)
    memory = case.memory(lambda x: np.array(mx.array(x).astype(mx.bfloat16).view(mx.uint16)))
    _, _, v, *held = case.views(**memory)
    wanted = expected(case, case.views(**{name: mx.array(x).view(mx.bfloat16) for name, x in memory.items()}))
    near = {"rtol": 2**-8, "atol": 1e-4}
    np.testing.assert_allclose(whole(queries), np.array(wanted.queries), **near)
    np.testing.assert_allclose(whole(caches[0][:, :, case.own]), np.array(wanted.keys[:, :, case.own]), **near)
    np.testing.assert_array_equal(caches[1][:, :, case.own], v)
    for found, old in zip(caches, held, strict=True):
        for columns in (slice(case.start), slice(case.end, None)):
            np.testing.assert_array_equal(found[:, :, columns], old[:, :, columns])


@pytest.mark.real_otherdevice
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("name", CASES)
def test_new_caches_hold_what_is_new(name: str, dtype: str, long: bool) -> None:
    case, kind = CASES[name], DTYPES[dtype]
    case = case._replace(end=case.end + 1500, columns=case.columns + 1500) if long else case
    size = mx.uint32 if kind == mx.float32 else mx.uint16
    memory = case.memory(lambda x: np.array(mx.array(x).astype(kind).view(size)))
    given = case.views(**{name: mx.array(x).view(kind) for name, x in memory.items()})
    found, wanted = op.store(*told(case, given), case.rope), expected(case, given)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, kind) for x in (given[0], given[3], given[4])]
    for ours, theirs in ((found.queries, wanted.queries), (found.keys[:, :, case.own], wanted.keys[:, :, case.own])):
        ours = np.array(ours.astype(mx.float32))
        np.testing.assert_allclose(ours, np.array(theirs), rtol=0, atol=TOLERANCES[kind])
    _, _, v, *held = case.views(**memory)
    bits = [np.array(x.view(size)) for x in found]
    np.testing.assert_array_equal(bits[2][:, :, case.own], v)
    for ours, old in zip(bits[1:], held, strict=True):
        for columns in (slice(case.start), slice(case.end, None)):
            np.testing.assert_array_equal(ours[:, :, columns], old[:, :, columns])


@pytest.mark.real_otherdevice
@pytest.mark.parametrize("name", CASES)
def test_several_tokens_are_what_each_is_alone(name: str) -> None:
    """What every test here compares with, by what those of one token do."""
    case = CASES[name]
    given = case.views(**{name: mx.array(x) for name, x in case.memory(lambda x: x).items()})
    q, k, v, *caches = (mx.where(mx.isnan(x), 0, x) for x in given)
    padding, end = told(case, ())
    wanted, queries = reference(q, k, v, *caches, padding, end, case.rope), list[mx.array]()
    for token in range(case.new):
        own = (x[:, :, token : token + 1] for x in (q, k, v))
        one, *caches = reference(*own, *caches, padding, end - case.new + token + 1, case.rope)
        queries.append(one)
    for ours, theirs in zip(wanted, (mx.concatenate(queries, axis=2), *caches), strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(theirs), rtol=1e-5, atol=2e-5)


def test_what_the_kernel_computes() -> None:
    assert op.fits((128, 128), (mx.bfloat16,) * 3)
    assert op.fits((80, 80), (mx.float16,) * 3)
    assert not op.fits((128, 64), (mx.bfloat16,) * 3)
    assert not op.fits((36, 36), (mx.bfloat16,) * 3)
    assert not op.fits((64, 64), (mx.bfloat16, mx.float16, mx.float16))
    assert not op.fits((64, 64), (mx.float32,) * 3)
