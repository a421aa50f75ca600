"""Rope of a few new tokens a row, and new caches that hold their keys and values, in one launch.

For caches that somebody else reads, too, and that are copied anyway, where a prompt goes on from a prefix of theirs: a
layer's two ropes, two copies and two updates are six calls otherwise, and such a step takes as long as its calls do.
Caches that nobody else reads are copied as well: 17 MB of a layer take 12 µs on an H200.
What is written in place is that of kernels/metal/rope_store.py, where this op's reference is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any
from zlib import crc32

import mlx.core as mx

from ..metal.rope_store import INPUTS, Rope, Stored, angle, reference
from .tensor_cores import HALVES

THREADS = 256  # of a block; each has 8 dims of a head of queries, or of one of keys and one of values
EIGHT = 8  # of them are the 16 bytes that a thread reads at once

# Queries come first, as they take longest; then every column of the caches, old or new. A dim that turns is computed
# from its pair by itself: few do, and the other dim may be another thread's.
SOURCE = """
    struct alignas(16) Eight { T x[8]; };
    constexpr int EIGHTS = DIM / 8, half_dims = DIMS / 2;
    const int rows = q_shape[0], heads = q_shape[1], kv_heads = keys_shape[1], count = q_shape[2];
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, first = thread % EIGHTS * 8;
    const bool query = thread / EIGHTS < rows * heads * count;
    const int place = thread / EIGHTS - (query ? 0 : rows * heads * count);  // in the output
    const int length = query ? count : keys_shape[2], row_heads = query ? heads : kv_heads;
    const int row = place / length / row_heads, head = place / length % row_heads, start = ends[0] - count;
    if (row >= rows) return;
    const int column = place % length + (query ? start : 0), token = column - start;
    const int64_t to = int64_t(place) * DIM + first;

    if (token < 0 || token >= count) {
      const T* key = keys + row * keys_strides[0] + head * keys_strides[1] + column * keys_strides[2] + first;
      const T* value = values + row * values_strides[0] + head * values_strides[1] + column * values_strides[2] + first;
      const Eight own_key = *(const Eight*)key, own_value = *(const Eight*)value;
      *(Eight*)(new_keys + to) = own_key;
      *(Eight*)(new_values + to) = own_value;
      return;
    }
    const T* from = query ? q + row * q_strides[0] + head * q_strides[1] + token * q_strides[2]
                          : k + row * k_strides[0] + head * k_strides[1] + token * k_strides[2];
    const int64_t step = query ? q_strides[3] : k_strides[3];
    Eight written;
    #pragma unroll
    for (int i = 0; i < 8; i++) {
      const int dim = first + i;
      if (dim >= DIMS) {
        written.x[i] = from[dim * step];
        continue;
      }
      const int pair = TRADITIONAL ? dim / 2 : dim % half_dims;
      const int one = TRADITIONAL ? 2 * pair : pair, other = TRADITIONAL ? one + 1 : one + half_dims;
      const float angle = ANGLE;
      const float cosine = cos(angle), sine = sin(angle);
      const float x = float(from[one * step]), y = float(from[other * step]);
      written.x[i] = T(dim == one ? x * cosine - y * sine : x * sine + y * cosine);
    }
    *(Eight*)((query ? turned : new_keys) + to) = written;
    if (query) return;
    const T* value = v + row * v_strides[0] + head * v_strides[1] + token * v_strides[2];
    #pragma unroll
    for (int i = 0; i < 8; i++) written.x[i] = value[(first + i) * v_strides[3]];
    *(Eight*)(new_values + to) = written;
"""
OUTPUTS = ("turned", "new_keys", "new_values")


def source(rope: Rope) -> str:
    return SOURCE.replace("ANGLE", angle(rope))


def threads(q: tuple[int, ...], keys: tuple[int, ...]) -> int:
    """How many queries [rows, heads, new, dim] and caches [rows, kv heads, columns, dim] want."""
    rows, heads, new, dim = q
    return rows * (heads * new + keys[1] * keys[2]) * (dim // EIGHT)


def fits(dims: tuple[int, int], dtypes: tuple[mx.Dtype, ...]) -> bool:
    """Whether the kernel computes these: dims of keys and values, the dtypes of queries, keys and values."""
    return len(set(dtypes)) == 1 and dtypes[0] in HALVES and dims[0] == dims[1] and dims[0] % EIGHT == 0


@cache
def _kernel(lines: str, inputs: tuple[str, ...]) -> Any:
    name = f"localllm_few_store_{crc32(lines.encode()):08x}"  # by which MLX finds it again, also on disk
    return mx.fast.cuda_kernel(name, list(inputs), list(OUTPUTS), lines, ensure_row_contiguous=False)


@lru_cache(4096)
def _call(
    q: tuple[int, ...], keys: tuple[int, ...], value_dim: int, dtypes: tuple[mx.Dtype, ...], rope: Rope
) -> Callable[..., list[mx.array]] | None:
    """The kernel with all that these calls have in common; None where it does not compute them."""
    if not mx.cuda.is_available() or not fits((keys[3], value_dim), dtypes):
        return None
    compiled = _kernel(source(rope), INPUTS if rope.freqs is None else (*INPUTS, "freqs"))
    freqs = () if rope.freqs is None else (mx.contiguous(rope.freqs),)
    constants = {"T": dtypes[0], "DIM": keys[3], "DIMS": rope.dims, "TRADITIONAL": bool(rope.traditional)}
    grid = (threads(q, keys), 1, 1)

    def call(*inputs: mx.array) -> list[mx.array]:
        found: list[mx.array] = compiled(
            inputs=[*inputs, *freqs],
            template=[*constants.items()],
            grid=grid,
            threadgroup=(THREADS, 1, 1),
            output_shapes=[q, keys, keys],
            output_dtypes=[dtypes[0]] * 3,
        )
        return found

    return call


def store(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    keys: mx.array,
    values: mx.array,
    padding: mx.array,
    end: mx.array,
    rope: Rope,
) -> Stored:
    """See `reference`, which computes what does not fit; all three are new arrays. The caches may be any columns of
    something larger, if they and their rows, heads and columns begin at multiples of 16 bytes."""
    call = _call(q.shape, keys.shape, values.shape[3], (q.dtype, keys.dtype, values.dtype), rope)
    if call is None:
        return reference(q, k, v, keys, values, padding, end, rope)
    return Stored(*call(q, k, v, keys, values, padding, end))
