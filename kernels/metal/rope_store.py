"""Rotates one new token of each row and writes its keys and values into the caches, in one launch.

MLX's kernels return new arrays, and its cache updates copy a cache that a running step still reads. This kernel returns
the rotated queries and writes one column of its inputs, the caches. MLX knows of no dependency on that write. So the
attention must be one kernel that takes the rotated queries: MLX runs it after this one. An attention of several kernels
may read the column too early.
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
THREADS = 256  # threads of a block; a thread rotates or copies two dims of a head


@dataclass(frozen=True, eq=False, slots=True)
class Rope:
    """The arguments of mx.fast.rope."""

    dims: int  # number of rotated dims: the first ones of a head
    traditional: bool  # pairs are (2i, 2i + 1), not (i, i + dims / 2)
    base: float | None
    scale: float = 1.0  # factor of the positions
    freqs: mx.array | None = None  # [dims / 2] float32, in place of a base


class Stored(NamedTuple):
    """The rotated queries, and the caches with the new keys and values."""

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
    """Rotates q and k. Returns the rotated q, and the caches with the rotated k and v in columns end - new … end - 1.

    q [rows, heads, new, dim], k and v [rows, kv heads, new, dim].
    keys and values (the caches) [rows, kv heads, columns, dim].
    padding [rows] int32: the number of columns before position 0 of a row.
    end [1] int32: the column after the new ones.
    The kernel of this file supports one new column only.
    """
    start = end - k.shape[2]
    query, key = (
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
    return Stored(query, mx.slice_update(keys, key, start, (2,)), mx.slice_update(values, v, start, (2,)))


# The coordinates of `thread`: pair of dims, head (of queries, then keys, then values), row.
SOURCE = """
    const int pair = thread.x, slot = thread.y, row = thread.z, column = ends[0] - 1;
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
    const bool rotates = pair < half_dims, halves = rotates && !TRADITIONAL;
    const int one = halves ? pair : 2 * pair, other = halves ? pair + half_dims : 2 * pair + 1;
    if (!rotates) {
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
    const uint3 thread = thread_position_in_grid;
"""
INPUTS = ("q", "k", "v", "keys", "values", "padding", "ends")


def angle(rope: Rope) -> str:
    """Metal source code of the angle by which the kernel rotates a pair of dims of the token in `column` of `row`.

    It is the same expression as in MLX's kernel, which rotates the keys of a prefill.
    """
    if rope.freqs is not None:
        inverse = "1.0f / freqs[pair]"
    else:
        assert rope.base is not None, "a rope has a base or freqs"
        inverse = f"exp2(-(float(pair) / float(half_dims)) * {math.log2(rope.base)!r}f)"
    return f"{float(rope.scale)!r}f * float(column - padding[row]) * ({inverse})"


def source(rope: Rope) -> str:
    """The source lines of the kernel that do not depend on the device."""
    return SOURCE.replace("ANGLE", angle(rope))


@cache
def kernel(lines: str, inputs: tuple[str, ...]) -> Any:
    # MLX caches kernels by name, also on disk, so each source has its own name.
    name = f"localllm_rope_store_{crc32(lines.encode()):08x}"
    # The kernel must write the caches, whose rows are strided, and not contiguous copies of them.
    return mx.fast.metal_kernel(name, list(inputs), ["out"], lines, ensure_row_contiguous=False)


def fits(dims: tuple[int, int], dtypes: tuple[mx.Dtype, ...], rope: Rope) -> bool:
    """True if the kernel supports these head dims (of keys, of values) and these dtypes of its inputs."""
    return (
        len(set(dtypes)) == 1
        and dtypes[0] in FLOATS
        and not any(dim % 2 or not 8 <= dim <= 2 * THREADS for dim in dims)
        and rope.dims % 2 == 0
        and 0 < rope.dims <= dims[0]
    )


def compiled_store(q: mx.array, keys: mx.array, values: mx.array, rope: Rope) -> Store:
    """A function that launches the kernel for arrays of these shapes and dtypes."""
    rows, heads, _, dim = q.shape
    kv_heads = keys.shape[1]
    value_dim = values.shape[3]
    inputs = INPUTS if rope.freqs is None else (*INPUTS, "freqs")
    pairs = max(dim, value_dim) // 2
    constants = {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "VALUE_DIM": value_dim, "DIMS": rope.dims}
    call = partial(
        kernel(METAL + source(rope), inputs),
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


def store_for(q: mx.array, keys: mx.array, values: mx.array, rope: Rope) -> Store:
    """A function that computes `reference` for arrays of these shapes and dtypes."""
    dims = (keys.shape[3], values.shape[3])
    if mx.metal.is_available() and fits(dims, (q.dtype, keys.dtype, values.dtype), rope):
        return compiled_store(q, keys, values, rope)
    return partial(reference, rope=rope)
