"""Rope of one new token a row, and the write of its keys and values into their caches, in one launch.

MLX's kernels answer with new arrays, and its own updates copy a cache that a running step still reads. This kernel
answers with the turned queries and writes one column of the caches, which it is handed as inputs. That is right where
the attention that reads the column is one kernel, which takes the turned queries: MLX runs it behind this one. Whoever
else reads the column asks for it after the step was sent off; other columns stay as they are. It is not right where
attention is several kernels, since one that only copies keys would not wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple
from zlib import crc32

import mlx.core as mx

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
THREADS = 256  # of a block; each turns two dims of a head, or copies them


@dataclass(frozen=True, eq=False, slots=True)
class Rope:
    """How positions turn a head, as mx.fast.rope has it."""

    dims: int  # the first of a head; the rest stays
    traditional: bool  # pairs are neighbours, not halves
    base: float | None
    scale: float = 1.0  # of positions
    freqs: mx.array | None = None  # [dims / 2] float32, in place of a base


class Stored(NamedTuple):
    """What `reference` answers."""

    queries: mx.array
    keys: mx.array
    values: mx.array


Store = Callable[[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array, mx.array], Stored]


def reference(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    keys: mx.array,
    values: mx.array,
    padding: mx.array,
    end: mx.array,
    rope: Rope,
) -> Stored:
    """q, k, v [rows, heads or kv heads, new, dim] and caches [rows, kv heads, columns, dim] -> q turned, and the caches
    with k, turned, and v in the last `new` columns before `end`, [1] int32; `padding`, [rows] int32: columns before a
    row's position 0. The kernel of this file computes one new column."""
    start = end - k.shape[2]
    turned, key = (
        mx.fast.rope(
            x,
            rope.dims,
            traditional=rope.traditional,
            base=rope.base,
            scale=rope.scale,
            offset=start - padding,
            freqs=rope.freqs,
        )
        for x in (q, k)
    )
    return Stored(turned, mx.slice_update(keys, key, start, (2,)), mx.slice_update(values, v, start, (2,)))


# `at` is a thread's place: which pair of a head's dims, which head (of queries, then keys, then values), which row.
SOURCE = """
    const int pair = at.x, slot = at.y, row = at.z, column = ends[0] - 1;
    const bool query = slot < HEADS, value = slot >= HEADS + KV_HEADS;
    if (slot >= HEADS + 2 * KV_HEADS || 2 * pair >= (value ? VALUE_DIM : DIM)) return;
    if (value) {
      const int head = slot - HEADS - KV_HEADS;
      const device T* from = v + row * v_strides[0] + head * v_strides[1] + 2 * pair * v_strides[3];
      device T* to = (device T*)values + row * values_strides[0] + head * values_strides[1]
                   + column * values_strides[2] + 2 * pair * values_strides[3];
      to[0] = from[0];
      to[values_strides[3]] = from[v_strides[3]];
      return;
    }
    const int head = query ? slot : slot - HEADS;
    const device T* from = query ? q + row * q_strides[0] + head * q_strides[1]
                                 : k + row * k_strides[0] + head * k_strides[1];
    device T* to = query ? out + (row * HEADS + head) * DIM
                         : (device T*)keys + row * keys_strides[0] + head * keys_strides[1] + column * keys_strides[2];
    const int64_t read = query ? q_strides[3] : k_strides[3], written = query ? 1 : keys_strides[3];
    const int half_dims = DIMS / 2;
    const bool turns = pair < half_dims, halves = turns && !TRADITIONAL;
    const int one = halves ? pair : 2 * pair, other = halves ? pair + half_dims : 2 * pair + 1;
    if (!turns) {
      to[one * written] = from[one * read];
      to[other * written] = from[other * read];
      return;
    }
    const float angle = ANGLE;
    const float cosine = cos(angle), sine = sin(angle);
    const float x = float(from[one * read]), y = float(from[other * read]);
    to[one * written] = T(x * cosine - y * sine);
    to[other * written] = T(x * sine + y * cosine);
"""
METAL = """
    using metal::exp2;
    using metal::fast::cos;
    using metal::fast::sin;
    const uint3 at = thread_position_in_grid;
"""
INPUTS = ("q", "k", "v", "keys", "values", "padding", "ends")


def angle(rope: Rope) -> str:
    """By what the `pair` of `half_dims` turns of a token that lies in `column` of `row`, as an expression: computed as
    MLX's own kernel does, to which the keys of a prompt are due."""
    if rope.freqs is not None:
        inverse = "1.0f / freqs[pair]"
    else:
        assert rope.base is not None, "a rope has a base or freqs"
        inverse = f"exp2(-(float(pair) / float(half_dims)) * {math.log2(rope.base)!r}f)"
    return f"{float(rope.scale)!r}f * float(column - padding[row]) * ({inverse})"


def source(rope: Rope) -> str:
    """The kernel's lines but for those of its device."""
    return SOURCE.replace("ANGLE", angle(rope))


@cache
def kernel(make: Callable[..., Any], lines: str, inputs: tuple[str, ...]) -> Any:
    """`make`: MLX's for this device."""
    name = f"localllm_rope_store_{crc32(lines.encode()):08x}"  # by which MLX finds it again, also on disk
    return make(name, list(inputs), ["out"], lines, ensure_row_contiguous=False)  # a copy is not what is to be written


def fits(dims: tuple[int, int], dtypes: tuple[mx.Dtype, ...], rope: Rope) -> bool:
    """Whether the kernel computes these: dims of keys and values, the dtypes of all that is read."""
    return (
        len(set(dtypes)) == 1
        and dtypes[0] in FLOATS
        and not any(dim % 2 or not 8 <= dim <= 2 * THREADS for dim in dims)
        and rope.dims % 2 == 0
        and 0 < rope.dims <= dims[0]
    )


def launched(compiled: Callable[[Rope], Any], q: mx.array, keys: mx.array, values: mx.array, rope: Rope) -> Store:
    """The compiled kernel with all that calls with such arrays have in common."""
    (rows, heads, _, dim), kv_heads, value_dim = q.shape, keys.shape[1], values.shape[3]
    pairs = max(dim, value_dim) // 2
    constants = {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "VALUE_DIM": value_dim, "DIMS": rope.dims}
    call = partial(
        compiled(rope),
        template=[("T", q.dtype), *constants.items(), ("TRADITIONAL", bool(rope.traditional))],
        grid=(pairs, heads + 2 * kv_heads, rows),
        threadgroup=(pairs, max(1, THREADS // pairs), 1),
        output_shapes=[q.shape],
        output_dtypes=[q.dtype],
    )
    freqs = () if rope.freqs is None else (mx.contiguous(rope.freqs),)

    def store(
        q: mx.array, k: mx.array, v: mx.array, keys: mx.array, values: mx.array, padding: mx.array, end: mx.array
    ) -> Stored:
        return Stored(call(inputs=[q, k, v, keys, values, padding, end, *freqs])[0], keys, values)

    return store


def _metal(rope: Rope) -> Any:
    inputs = INPUTS if rope.freqs is None else (*INPUTS, "freqs")
    return kernel(mx.fast.metal_kernel, METAL + source(rope), inputs)


def prepared(q: mx.array, keys: mx.array, values: mx.array, rope: Rope) -> Store:
    """What computes `reference` for arrays like these."""
    dims, dtypes = (keys.shape[3], values.shape[3]), (q.dtype, keys.dtype, values.dtype)
    if mx.metal.is_available() and fits(dims, dtypes, rope):
        return launched(_metal, q, keys, values, rope)
    return partial(reference, rope=rope)
