"""Attention of one new token a row, rows of different length: split softmax as in flash-decoding (Dao et al., 2023).

MLX's own attention on CUDA has fast kernels only where every row sees the same columns: with a mask it computes
products and softmax one by one, which takes three to five times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any
from zlib import crc32

import mlx.core as mx

from .tensor_cores import HALVES

DIMS = (64, 128, 256)  # of a head: a whole number of 16-byte reads, shared by 8, 16 or 32 threads
THREADS = 256
SHARED = 1024  # heads of queries that share a head of keys, times their dim: their sums fit into a block's memory
ALONE = 2048  # columns up to which a row has one block, as joining what several found costs calls of its own
SHARE = 1024  # columns of a block in longer ones
MOST_SPLITS = 32
BUSY = 32  # blocks of one head of keys, from which on the GPU has enough of them

# A block computes one row and one head of keys for all query heads that share it. A thread holds 8 of a head's dims, so
# that a warp reads a few columns at once; each has its own running softmax, and all are joined at the end.
SOURCE = """
    constexpr int LANES = DIM / 8, KEYS = 32 / LANES, WARPS = 8, STREAMS = WARPS * KEYS, AHEAD = GROUP > 4 ? 2 : 4;
    struct alignas(16) Eight { T x[8]; };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % LANES, key = threadIdx.x % 32 / LANES;
    const int row = blockIdx.x / KV_HEADS, head = blockIdx.x % KV_HEADS;

    float query[GROUP][8], sum[GROUP][8], most[GROUP], total[GROUP];
    #pragma unroll
    for (int g = 0; g < GROUP; g++) {
      const Eight read = *(const Eight*)(q + row * q_strides[0] + (head * GROUP + g) * q_strides[1] + lane * 8);
      most[g] = -1e30f;
      total[g] = 0.0f;
      #pragma unroll
      for (int i = 0; i < 8; i++) {
        query[g][i] = float(read.x[i]) * (SCALE * 1.44269504f);
        sum[g][i] = 0.0f;
      }
    }

    int first = firsts[row], end = ends[0];
    if (SPLITS > 1) {
      const int share = (end - first + SPLITS - 1) / SPLITS;
      first += share * blockIdx.y;
      end = min(end, first + share);
    }
    const T* keys = k + row * k_strides[0] + head * k_strides[1] + lane * 8;
    const T* values = v + row * v_strides[0] + head * v_strides[1] + lane * 8;
    for (int base = first + warp * KEYS; base < end; base += STREAMS * AHEAD) {
      Eight key_read[AHEAD], value_read[AHEAD];
      #pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        const int64_t column = min(base + key + a * STREAMS, end - 1);
        key_read[a] = *(const Eight*)(keys + column * k_strides[2]);
        value_read[a] = *(const Eight*)(values + column * v_strides[2]);
      }
      #pragma unroll
      for (int g = 0; g < GROUP; g++) {
        float score[AHEAD], peak = most[g];
        #pragma unroll
        for (int a = 0; a < AHEAD; a++) {
          score[a] = 0.0f;
          #pragma unroll
          for (int i = 0; i < 8; i++) score[a] += query[g][i] * float(key_read[a].x[i]);
          #pragma unroll
          for (int other = LANES / 2; other > 0; other /= 2)
            score[a] += __shfl_xor_sync(0xffffffff, score[a], other);
          if (base + key + a * STREAMS >= end) score[a] = __int_as_float(0xff800000);  // minus infinity
          peak = max(peak, score[a]);
        }
        const float shrink = exp2f(most[g] - peak);
        most[g] = peak;
        total[g] *= shrink;
        #pragma unroll
        for (int i = 0; i < 8; i++) sum[g][i] *= shrink;
        #pragma unroll
        for (int a = 0; a < AHEAD; a++) {
          const float weight = exp2f(score[a] - peak);
          total[g] += weight;
          #pragma unroll
          for (int i = 0; i < 8; i++) sum[g][i] += weight * float(value_read[a].x[i]);
        }
      }
    }

    __shared__ float sums[WARPS][GROUP][DIM], mosts[WARPS][GROUP], totals[WARPS][GROUP];
    #pragma unroll
    for (int g = 0; g < GROUP; g++) {
      #pragma unroll
      for (int other = LANES; other < 32; other *= 2) {
        const float peak = max(most[g], __shfl_xor_sync(0xffffffff, most[g], other));
        const float shrink = exp2f(most[g] - peak);
        most[g] = peak;
        total[g] *= shrink;
        total[g] += __shfl_xor_sync(0xffffffff, total[g], other);
        #pragma unroll
        for (int i = 0; i < 8; i++) {
          sum[g][i] *= shrink;
          sum[g][i] += __shfl_xor_sync(0xffffffff, sum[g][i], other);
        }
      }
      if (key == 0) {
        #pragma unroll
        for (int i = 0; i < 8; i++) sums[warp][g][lane * 8 + i] = sum[g][i];
        if (lane == 0) mosts[warp][g] = most[g], totals[warp][g] = total[g];
      }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < GROUP * DIM; at += blockDim.x) {
      const int g = at / DIM;
      float peak = mosts[0][g], all = 0.0f, out_sum = 0.0f;
      for (int w = 1; w < WARPS; w++) peak = max(peak, mosts[w][g]);
      for (int w = 0; w < WARPS; w++) {
        const float weight = exp2f(mosts[w][g] - peak);
        all += weight * totals[w][g];
        out_sum += weight * sums[w][g][at % DIM];
      }
      const int64_t place = (int64_t(row) * KV_HEADS + head) * GROUP + g;
      out[(place * SPLITS + blockIdx.y) * DIM + at % DIM] = O(all > 0.0f ? out_sum / all : 0.0f);
LOGS
    }
"""
# Of blocks that share a row, by which their sums are weighted; one block of its own has no second result to tell.
LOGS = """
      if (at % DIM == 0) logs[place * SPLITS + blockIdx.y] = all > 0.0f ? (peak + log2f(all)) * 0.69314718f : -1e30f;
"""


def visible(firsts: mx.array, end: mx.array, columns: int, new: int = 1, window: int = 0) -> mx.array:
    """[rows, 1, new, columns] bool: a token sees no column before its row's of `firsts` [rows] int32, none behind its
    own, which are the last before `end` [1], and with a `window` only so many."""
    places, own = mx.arange(columns), (end - new + mx.arange(new))[:, None]
    seen = (places >= firsts[:, None, None, None]) & (places <= own)
    return seen & (places > own - window) if window else seen


def reference(q: mx.array, keys: mx.array, values: mx.array, firsts: mx.array, end: mx.array, scale: float) -> mx.array:
    """q [rows, heads, 1, dim]; keys, values [rows, kv heads, columns, dim]; what is seen: see `visible` -> as q."""
    mask = visible(firsts, end, keys.shape[2])
    return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask)


def fits(q: tuple[int, ...], kv_heads: int, dims: tuple[int, int], dtypes: tuple[mx.Dtype, ...]) -> bool:
    """Whether the kernel computes these: the shape of `q`, the dims of keys and values, the dtypes of all three."""
    heads, dim = q[1], q[3]
    return (
        len(set(dtypes)) == 1
        and dtypes[0] in HALVES
        and dim in DIMS
        and dims == (dim, dim)
        and heads // kv_heads * dim <= SHARED
    )


def shares(longest: int, rows: int) -> int:
    """How many blocks share the columns of a row, where the row that sees most of them sees so many."""
    splits = 1
    while longest > ALONE and splits < MOST_SPLITS and splits * SHARE < longest and splits * rows < BUSY:
        splits *= 2
    return splits


@cache
def _kernel(scale: float, shared: bool) -> Any:
    source = f"    constexpr float SCALE = {scale!r};\n" + SOURCE.replace("LOGS", LOGS if shared else "")
    name = f"localllm_decode_{crc32(source.encode()):08x}"  # by which MLX finds it again, also on disk
    inputs, outputs = ["q", "k", "v", "firsts", "ends"], ["out", "logs"] if shared else ["out"]
    return mx.fast.cuda_kernel(name, inputs, outputs, source, ensure_row_contiguous=False)


@lru_cache(4096)
def _call(
    q: tuple[int, ...], kv_heads: int, dims: tuple[int, int], dtypes: tuple[mx.Dtype, ...], splits: int, scale: float
) -> Callable[..., list[mx.array]] | None:
    """The kernel with all that these calls have in common; None where it does not compute them."""
    if not mx.cuda.is_available() or not fits(q, kv_heads, dims, dtypes):
        return None
    rows, heads, _, dim = q
    shared = splits > 1
    dtype, outputs = mx.float32 if shared else dtypes[0], 2 if shared else 1
    constants = {"DIM": dim, "KV_HEADS": kv_heads, "GROUP": heads // kv_heads, "SPLITS": splits}
    return partial(
        _kernel(scale, shared),
        template=[("T", dtypes[0]), ("O", dtype), *constants.items()],
        grid=(THREADS * rows * kv_heads, splits, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows, heads, splits, dim), (rows, heads, 1, splits)][:outputs],
        output_dtypes=[dtype, mx.float32][:outputs],
    )


Decode = Callable[[mx.array, mx.array, mx.array, mx.array, mx.array], mx.array]


def prepared(q: mx.array, keys: mx.array, values: mx.array, splits: int, scale: float) -> Decode:
    """`decode` for q, keys and values like these: a step of a small model is as long as the calls it makes."""
    kv_heads, dims, dtypes = keys.shape[1], (keys.shape[3], values.shape[3]), (q.dtype, keys.dtype, values.dtype)
    call = _call(q.shape, kv_heads, dims, dtypes, splits, scale)
    if call is None:
        return partial(reference, scale=scale)

    def alone(q: mx.array, keys: mx.array, values: mx.array, firsts: mx.array, end: mx.array) -> mx.array:
        return call(inputs=[q, keys, values, firsts, end])[0]

    def joined(q: mx.array, keys: mx.array, values: mx.array, firsts: mx.array, end: mx.array) -> mx.array:
        out, logs = call(inputs=[q, keys, values, firsts, end])
        return (mx.softmax(logs, axis=-1) @ out).astype(q.dtype)

    return alone if splits == 1 else joined


def decode(
    q: mx.array, keys: mx.array, values: mx.array, firsts: mx.array, end: mx.array, splits: int, scale: float
) -> mx.array:
    """See `reference`, which computes what does not fit; `splits`: see `shares`."""
    return prepared(q, keys, values, splits, scale)(q, keys, values, firsts, end)
