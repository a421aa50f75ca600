"""Products of up to 16 rows with int4 weights that cuda/products/linear.py packs: it transposes the nibbles, and
the scales and zero points.

Devices with too little shared memory for the CUDA C++ kernel use this file. small_batch.py, for weights in plain order,
is faster: it reads 16 contiguous bytes of an output at a time, and this kernel reads 4.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .widen import Quantised, block_inputs, record_of, transposed_nibbles

BLOCK_N = 64
WARPS = 8
STAGES = 3


@triton.jit(do_not_specialize=["rows"])
def small_batch_transposed_kernel(
    out, x, data, records, bias, rows, out_features, in_features, subs, sub, x_stride, pitch,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of outputs. The BLOCK_K inputs of a block have the same scale and zero point."""
    row = tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = output < out_features
    near = tl.minimum(output, out_features - 1)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, in_features, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = (row < rows)[:, None] & (k < in_features)[None, :]
        activations = tl.load(x + row.to(tl.int64)[:, None] * x_stride + k[None, :], mask=inside, other=0.0)
        factor, shift = record_of(records, records, near, first // sub, out_features, subs, True, "transposed")
        integers = transposed_nibbles(data, near, first, in_features, pitch, BLOCK_K).to(tl.float32)
        weights = (integers - shift[:, None]).to(activations.dtype)
        sums += tl.dot(activations, tl.trans(weights), input_precision="ieee") * factor[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + near).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * out_features + output[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=(row < rows)[:, None] & there[None, :])


def small_batch_transposed(x: Tensor, weight: Quantised, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [1…16 rows, in_features] times an int4 weight whose `records` is "transposed" -> [rows, out_features] in
    `dtype`."""
    rows, in_features = x.shape
    out_features = weight.out_features
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty(rows, out_features, dtype=dtype)
    records = weight.scale
    small_batch_transposed_kernel[(triton.cdiv(out_features, BLOCK_N),)](
        out, x, weight.data, records, records if bias is None else bias, rows, out_features, in_features,
        weight.subs, weight.sub, x.stride(0), weight.data.stride(0),
        bias is not None, 16, BLOCK_N, block_inputs(weight.sub, in_features, 64),
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out
