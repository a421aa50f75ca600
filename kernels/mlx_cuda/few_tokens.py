"""Attention of a few new tokens a row, behind positions that are there: a hit, or the last chunk of a prompt.

MLX asks cuDNN for a plan for every number of positions that it has not met, which takes some 50 ms: a conversation
meets another with each turn. Split softmax over tensor cores, as in flash-decoding (Dao et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any
from zlib import crc32

import mlx.core as mx

from .decode import visible
from .tensor_cores import HALVES, available, multiply

DIMS = (64, 128)  # of a head: more are too many for a thread's registers
TOKENS = 64  # most; beyond, a plan is worth its time
TILE = 16  # queries that a warp answers: tokens times heads of queries that share one of keys
WARPS = 8  # most of a block: they read the same columns
BUSY = 1024  # warps, from which on the GPU has enough of them
SHARE = 64  # columns of a warp, at least
MOST_SPLITS = 32

# A warp answers TILE queries of one head of keys over a share of the columns. Which number is multiplied in which place
# of a tensor core's tile does not matter as long as both factors agree, so a thread takes 16 bytes that lie together:
# of queries and keys 8 of the 32 dims that two products sum up; of values 8 dims in as many products' places, of two
# columns a register.
SOURCE = """
    constexpr int CHUNKS = DIM / 32, PARTS = DIM / 64;
    struct alignas(16) Words { uint32_t x[4]; };
    struct alignas(16) Eight { O x[8]; };
    const int lane = threadIdx.x % 32, quarter = lane % 4, line = lane / 4;
    const int kv_heads = k_shape[1], group = q_shape[1] / kv_heads, count = q_shape[2], queries = group * count;
    const int tiles = (queries + 15) / 16, warps = blockDim.x / 32, blocks = (tiles + warps - 1) / warps;
    const int splits = gridDim.y;
    const int tile = blockIdx.x % blocks * warps + threadIdx.x / 32;
    const int head = blockIdx.x / blocks % kv_heads, row = blockIdx.x / blocks / kv_heads;
    if (tile >= tiles) return;

    const int start = ends[0] - count;
    int token[2], own[2];  // of this thread's two queries; the second may be none, and is then the last again
    Words query[2][CHUNKS];
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const int at = min(tile * 16 + i * 8 + line, queries - 1);
      token[i] = at / group;
      own[i] = head * group + at % group;
      const T* from = q + row * q_strides[0] + own[i] * q_strides[1] + token[i] * q_strides[2] + quarter * 8;
      #pragma unroll
      for (int c = 0; c < CHUNKS; c++) query[i][c] = *(const Words*)(from + c * 32);
    }

    // What the first of the tile's queries sees first, and the last one last.
    int first = firsts[row], last = start + min(tile * 16 + 15, queries - 1) / group + 1;
    if (WINDOW) first = max(first, start + tile * 16 / group + 1 - WINDOW);
    if (splits > 1) {
      const int share = ((last - first + splits - 1) / splits + 15) / 16 * 16;
      first += share * blockIdx.y;
      last = min(last, first + share);
    }

    float sums[PARTS * 8][4], most[2] = {-1e30f, -1e30f}, total[2] = {0.0f, 0.0f};
    #pragma unroll
    for (int t = 0; t < PARTS * 8; t++)
      #pragma unroll
      for (int i = 0; i < 4; i++) sums[t][i] = 0.0f;
    const T* keys = k + row * k_strides[0] + head * k_strides[1] + quarter * 8;
    const T* values = v + row * v_strides[0] + head * v_strides[1] + line * 8;
    for (int base = first; base < last; base += 16) {
      Words key[2][CHUNKS], value[4][PARTS];
      #pragma unroll
      for (int j = 0; j < 2; j++) {
        const int64_t column = min(base + j * 8 + line, last - 1);
        #pragma unroll
        for (int c = 0; c < CHUNKS; c++) key[j][c] = *(const Words*)(keys + column * k_strides[2] + c * 32);
      }
      #pragma unroll
      for (int j = 0; j < 4; j++) {
        const int64_t column = min(base + j / 2 * 8 + quarter * 2 + j % 2, last - 1);
        #pragma unroll
        for (int h = 0; h < PARTS; h++) value[j][h] = *(const Words*)(values + column * v_strides[2] + h * 64);
      }

      float score[2][4], peak[2] = {most[0], most[1]};
      #pragma unroll
      for (int j = 0; j < 2; j++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) score[j][i] = 0.0f;
        #pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
          const uint32_t *one = query[0][c].x, *other = query[1][c].x, *with = key[j][c].x;
          multiply(score[j], one[0], other[0], one[1], other[1], with[0], with[1]);
          multiply(score[j], one[2], other[2], one[3], other[3], with[2], with[3]);
        }
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          const int column = base + j * 8 + quarter * 2 + i % 2, place = start + token[i / 2];
          const bool seen = column <= place && (!WINDOW || column > place - WINDOW);
          score[j][i] = seen ? score[j][i] * (SCALE * 1.44269504f) : __int_as_float(0xff800000);  // minus infinity
          peak[i / 2] = max(peak[i / 2], score[j][i]);
        }
      }
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        peak[i] = max(peak[i], __shfl_xor_sync(0xffffffff, peak[i], 1));
        peak[i] = max(peak[i], __shfl_xor_sync(0xffffffff, peak[i], 2));
        const float shrink = exp2f(most[i] - peak[i]);
        most[i] = peak[i];
        total[i] *= shrink;
        #pragma unroll
        for (int t = 0; t < PARTS * 8; t++) sums[t][i * 2] *= shrink, sums[t][i * 2 + 1] *= shrink;
      }
      #pragma unroll
      for (int j = 0; j < 2; j++)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          score[j][i] = exp2f(score[j][i] - peak[i / 2]);
          total[i / 2] += score[j][i];
        }
      uint32_t weight[4];
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        const T low = T(score[i / 2][i % 2 * 2]), high = T(score[i / 2][i % 2 * 2 + 1]);
        weight[i] = uint32_t(*(const uint16_t*)&high) << 16 | *(const uint16_t*)&low;
      }
      #pragma unroll
      for (int h = 0; h < PARTS; h++)
        #pragma unroll
        for (int t = 0; t < 8; t++) {
          const int half = t % 2 ? 0x7632 : 0x5410;  // of both registers
          const uint32_t near = __byte_perm(value[0][h].x[t / 2], value[1][h].x[t / 2], half);
          const uint32_t far = __byte_perm(value[2][h].x[t / 2], value[3][h].x[t / 2], half);
          multiply(sums[h * 8 + t], weight[0], weight[1], weight[2], weight[3], near, far);
        }
    }

    #pragma unroll
    for (int i = 0; i < 2; i++) {
      total[i] += __shfl_xor_sync(0xffffffff, total[i], 1);
      total[i] += __shfl_xor_sync(0xffffffff, total[i], 2);
      if (tile * 16 + i * 8 + line >= queries) continue;
      const int64_t place = ((int64_t(row) * count + token[i]) * q_shape[1] + own[i]) * splits + blockIdx.y;
      const float one = total[i] > 0.0f ? 1.0f / total[i] : 0.0f;
      #pragma unroll
      for (int h = 0; h < PARTS; h++)
        #pragma unroll
        for (int j = 0; j < 2; j++) {
          Eight written;
          #pragma unroll
          for (int t = 0; t < 8; t++) written.x[t] = O(sums[h * 8 + t][i * 2 + j] * one);
          *(Eight*)(out + place * DIM + h * 64 + (quarter * 2 + j) * 8) = written;
        }
LOGS
    }
"""
LOGS = """
      if (quarter == 0) logs[place] = total[i] > 0.0f ? most[i] + log2f(total[i]) : -1e30f;
"""
# What warps that share a query's columns found, joined: a block a query, a thread a dim.
JOIN = """
    const int splits = logs_shape[3];
    const float *own = logs + int64_t(blockIdx.x) * splits, *from = parts + int64_t(blockIdx.x) * splits * DIM;
    float peak = own[0], all = 0.0f, sum = 0.0f;
    for (int s = 1; s < splits; s++) peak = max(peak, own[s]);
    for (int s = 0; s < splits; s++) {
      const float weight = exp2f(own[s] - peak);
      all += weight;
      sum += weight * from[s * DIM + threadIdx.x];
    }
    out[int64_t(blockIdx.x) * DIM + threadIdx.x] = T(sum / all);
"""


def reference(
    q: mx.array, keys: mx.array, values: mx.array, firsts: mx.array, end: mx.array, window: int, scale: float
) -> mx.array:
    """q [rows, heads, new, dim]; keys, values [rows, kv heads, columns, dim]; what is seen: see `visible` -> as q."""
    mask = visible(firsts, end, keys.shape[2], q.shape[2], window)
    return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask)


def fits(new: int, dims: tuple[int, int], dtype: mx.Dtype) -> bool:
    """Whether the kernel computes so many tokens of a row, for these dims of keys and values, which have a `dtype`."""
    return new <= TOKENS and dims[0] == dims[1] and dims[0] in DIMS and dtype in HALVES


@lru_cache(4096)
def shares(longest: int, rows: int, heads: int, new: int) -> int:
    """How many warps share the columns of a query, where the row that sees most of them sees so many."""
    splits = 1
    while splits < MOST_SPLITS and splits * SHARE < longest and splits * rows * heads * new < BUSY * TILE:
        splits *= 2
    return splits


def shared_as(longest: int) -> int:
    """Columns for which `shares` says the same, as few numbers as can be."""
    splits = 1
    while splits < MOST_SPLITS and splits * SHARE < longest:
        splits *= 2
    return splits * SHARE


@cache
def _kernel(dtype: mx.Dtype, scale: float, shared: bool) -> Any:
    header = multiply(dtype)
    source = f"    constexpr float SCALE = {scale!r};\n" + SOURCE.replace("LOGS", LOGS if shared else "")
    name = f"localllm_few_tokens_{crc32((header + source).encode()):08x}"  # by which MLX finds it again, also on disk
    inputs, outputs = ["q", "k", "v", "firsts", "ends"], ["out", "logs"] if shared else ["out"]
    return mx.fast.cuda_kernel(name, inputs, outputs, source, header, ensure_row_contiguous=False)


@cache
def _join() -> Any:
    return mx.fast.cuda_kernel(f"localllm_join_{crc32(JOIN.encode()):08x}", ["parts", "logs"], ["out"], JOIN)


def _launch(tiles: int, pairs: int) -> tuple[int, int]:
    """(blocks, threads of each) for so many tiles of so many pairs of a row and a head of keys."""
    blocks = -(-tiles // WARPS)
    return blocks * pairs, 32 * -(-tiles // blocks)


@lru_cache(4096)
def _calls(
    q: tuple[int, ...],
    kv_heads: int,
    dims: tuple[int, int],
    dtypes: tuple[mx.Dtype, ...],
    splits: int,
    window: int,
    scale: float,
) -> tuple[Callable[..., list[mx.array]], Callable[..., list[mx.array]]] | None:
    """The kernels with all that these calls have in common; None where they do not compute them."""
    if not available() or len(set(dtypes)) > 1 or not fits(q[2], dims, dtypes[0]):
        return None
    (rows, heads, new, dim), dtype = q, dtypes[0]
    shared = splits > 1
    blocks, threads = _launch(-(-heads // kv_heads * new // TILE), rows * kv_heads)
    written, outputs = mx.float32 if shared else dtype, 2 if shared else 1
    whole = (rows, new, heads, dim)
    call = partial(
        _kernel(dtype, scale, shared),
        template=[("T", dtype), ("O", written), ("DIM", dim), ("WINDOW", window)],
        grid=(blocks * threads, splits, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, new, heads, splits, dim) if shared else whole, (rows, new, heads, splits)][:outputs],
        output_dtypes=[written, mx.float32][:outputs],
    )
    join = partial(
        _join(),
        template=[("T", dtype), ("DIM", dim)],
        grid=(rows * new * heads * dim, 1, 1),
        threadgroup=(dim, 1, 1),
        output_shapes=[whole],
        output_dtypes=[dtype],
    )
    return call, join


def attend(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    firsts: mx.array,
    end: mx.array,
    window: int,
    splits: int,
    scale: float,
) -> mx.array:
    """See `reference`, which computes what does not fit; `splits`: see `shares`."""
    dims, dtypes = (keys.shape[3], values.shape[3]), (q.dtype, keys.dtype, values.dtype)
    calls = _calls(q.shape, keys.shape[1], dims, dtypes, splits, window, scale)
    if calls is None:
        return reference(q, keys, values, firsts, end, window, scale)
    found = calls[0](inputs=[q, keys, values, firsts, end])
    whole = found[0] if splits == 1 else calls[1](inputs=found)[0]
    return whole.swapaxes(1, 2)  # a model turns it back: its tokens lie together
