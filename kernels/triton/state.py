"""Recurrent layers on GPUs: convolutions, the scans of Gated DeltaNet and Mamba2, gated norms; kernels/ops/state.py
defines them.

A scan keeps some columns of the state of a head in registers and computes the tokens of a row one after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops import state as reference
from ..ops.state import Conv, Delta, GateOrder, Ssd, StateRows
from .target import supports

CHANNELS = 256  # channels of a program
NUMBERS = 4096  # numbers of a state that a program keeps in registers
MAX_DIM = 8192  # largest dim of gated_norm: a program keeps a group in registers
_STEP = ["starts", "contexts", "slots"]  # arguments whose addresses change from step to step


def conv(x: Tensor, rows: StateRows, target: Conv) -> Tensor:
    return _convolved(x, rows, target, gated=False) if _takes(x, target) else reference.conv(x, rows, target)


def short_conv(x: Tensor, rows: StateRows, target: Conv) -> Tensor:
    return _convolved(x, rows, target, gated=True) if _takes(x, target) else reference.short_conv(x, rows, target)


def _takes(x: Tensor, target: Conv) -> bool:
    return supports(x) and x.stride(1) == 1 and target.states.dtype == torch.float32


def _convolved(x: Tensor, rows: StateRows, target: Conv, gated: bool) -> Tensor:
    width, channels = target.weight.shape
    out = x.new_empty(x.shape[0], channels)
    if not len(x):
        return out
    starts, contexts = rows.rows.row_starts, rows.rows.context_lens
    one = len(x) == len(rows.slots) and all(length == 1 for length in rows.rows.query_lens)
    row_of = None if one else torch.searchsorted(starts[1:], torch.arange(len(x), device=x.device), right=True)
    blocks = triton.cdiv(channels, CHANNELS)
    sizes = {"GATED": gated, "WIDTH": width, "CHANNELS": CHANNELS}
    tensors = x, target.weight, target.bias, target.states, starts, contexts, rows.slots
    _convolve[(len(x), blocks)](out, row_of, *tensors, channels, x.stride(0), **sizes)
    if not one:
        _keep[(len(rows.slots), blocks)](x, target.states, starts, contexts, rows.slots, channels, x.stride(0), **sizes)
    return out


@triton.jit
def _input(x, at, column, inside, channels, stride, GATED: tl.constexpr):
    """The inputs of token `at`; with gates the product of the first and the third part."""
    value = tl.load(x + at * stride + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        value *= tl.load(x + at * stride + 2 * channels + column, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def _earlier(x, states, slot, continues, start, at, column, inside, channels, stride, GATED: tl.constexpr,
             WIDTH: tl.constexpr):  # fmt: skip
    """The inputs of token `at` of a row that starts at token `start`; before it, those of the state."""
    value = _input(x, at, column, inside & (at >= start), channels, stride, GATED)
    stored = (slot * (WIDTH - 1) + WIDTH - 1 + at - start) * channels + column
    return value + tl.load(states + stored, mask=inside & (at < start) & continues, other=0.0)


@triton.jit(do_not_specialize_on_alignment=_STEP)
def _convolve(
    out, row_of, x, weight, bias, states, starts, contexts, slots, channels, stride,
    GATED: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A program per token and block of channels. Without `row_of` every row has one token, and writes its state."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < channels
    row = token
    if row_of is not None:
        row = tl.load(row_of + token)
    start = tl.load(starts + row)
    slot = tl.load(slots + row).to(tl.int64)
    continues = (slot >= 0) & (tl.load(contexts + row) > tl.load(starts + row + 1) - start)
    total = tl.zeros((CHANNELS,), tl.float32)
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH):
        at = token - (WIDTH - 1) + tap
        value = _earlier(x, states, slot, continues, start, at, column, inside, channels, stride, GATED, WIDTH)
        total += value * tl.load(weight + tap * channels + column, mask=inside, other=0.0).to(tl.float32)
        if row_of is None and tap > 0:  # this program has read the value before
            kept = states + (slot * (WIDTH - 1) + tap - 1) * channels + column
            tl.store(kept, value, mask=inside & (slot >= 0))
    if GATED:
        total *= tl.load(x + token * stride + channels + column, mask=inside, other=0.0).to(tl.float32)
    else:
        total *= tl.sigmoid(total)
    tl.store(out + token * channels + column, total, mask=inside)


@triton.jit(do_not_specialize_on_alignment=_STEP)
def _keep(
    x, states, starts, contexts, slots, channels, stride,
    GATED: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Writes the last inputs of a row to its state, the oldest first: no later input is read after its place is
    written."""
    row = tl.program_id(0)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    start, end = tl.load(starts + row).to(tl.int64), tl.load(starts + row + 1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    continues = (slot >= 0) & (tl.load(contexts + row) > end - start)
    inside = (column < channels) & (slot >= 0) & (end > start)
    for tap in tl.static_range(WIDTH - 1):
        at = end - (WIDTH - 1) + tap
        value = _earlier(x, states, slot, continues, start, at, column, inside, channels, stride, GATED, WIDTH)
        tl.store(states + (slot * (WIDTH - 1) + tap) * channels + column, value, mask=inside)


def gated_delta(qkv: Tensor, a: Tensor, b: Tensor, rows: StateRows, target: Delta) -> Tensor:
    if not _scans(target.states, qkv, a, b):
        return reference.gated_delta(qkv, a, b, rows, target)
    _, heads, key_dim, dim = target.states.shape
    keys = (qkv.shape[1] - heads * dim) // 2
    return _scanned(qkv, (0, keys, 2 * keys), a, b, None, rows, target, (0.0, float("inf")), keys // key_dim)


def ssd(x: Tensor, dt: Tensor, rows: StateRows, target: Ssd) -> Tensor:
    if not _scans(target.states, x, dt):
        return reference.ssd(x, dt, rows, target)
    _, heads, key_dim, dim = target.states.shape
    values = heads * dim
    keys = (x.shape[1] - values) // 2
    limits = target.dt_min, target.dt_max
    return _scanned(x, (values + keys, values, 0), dt, None, target.skip, rows, target, limits, keys // key_dim)


def _scans(states: Tensor, *inputs: Tensor) -> bool:
    """True if the kernel supports the states and the inputs [tokens, …]."""
    supported = all(supports(each) and each.stride(1) == 1 for each in inputs)
    return supported and states.dtype == torch.float32 and states.shape[2] <= NUMBERS // 16


def _scanned(
    x: Tensor, parts: tuple[int, int, int], step: Tensor, beta: Tensor | None, skip: Tensor | None, rows: StateRows,
    target: Delta | Ssd, limits: tuple[float, float], shared: int,
) -> Tensor:  # fmt: skip
    """parts: the columns of x from which on it has queries, keys and values. shared: the number of key heads."""
    _, heads, key_dim, dim = target.states.shape
    out = x.new_empty(len(x), heads, dim)
    if len(x):
        keys = triton.next_power_of_2(key_dim)
        columns = min(triton.next_power_of_2(dim), NUMBERS // keys)
        tables = rows.rows.row_starts, rows.rows.context_lens, rows.slots
        _scan[(len(rows.slots) * heads, triton.cdiv(dim, columns))](
            out, x, step, beta, target.rates, target.dt_bias, skip, target.states, *tables, *parts,
            heads, heads // shared, key_dim, dim, x.stride(0), step.stride(0), 0 if beta is None else beta.stride(0),
            *limits, KEYS=keys, COLUMNS=columns,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=_STEP)
def _scan(
    out, x, step, beta, rates, dt_bias, skip, states, starts, contexts, slots, query_at, key_at, value_at,
    heads, shared, key_dim, dim, stride, step_stride, beta_stride, dt_min, dt_max,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program per row, head and block of columns of the state."""
    row, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    key_row = tl.arange(0, KEYS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_value = key_row < key_dim, column < dim
    inside = is_key[:, None] & is_value[None, :]
    start, end = tl.load(starts + row).to(tl.int64), tl.load(starts + row + 1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    stored = states + ((slot * heads + head) * key_dim + key_row[:, None]) * dim + column[None, :]
    continues = (slot >= 0) & (tl.load(contexts + row) > end - start)
    state = tl.load(stored, mask=inside & continues, other=0.0)
    rate, shift = tl.load(rates + head), tl.load(dt_bias + head)
    keys = head // shared * key_dim + key_row
    for position in range(end - start):
        token = start + position
        query = tl.load(x + token * stride + query_at + keys, mask=is_key, other=0.0).to(tl.float32)
        key = tl.load(x + token * stride + key_at + keys, mask=is_key, other=0.0).to(tl.float32)
        value = tl.load(x + token * stride + value_at + head * dim + column, mask=is_value, other=0.0).to(tl.float32)
        size = tl.load(step + token * step_stride + head).to(tl.float32) + shift
        size = tl.where(size > 20.0, size, tl.log(1.0 + tl.exp(tl.minimum(size, 20.0))))
        size = tl.minimum(tl.maximum(size, dt_min), dt_max)
        state *= tl.exp(-rate * size)
        if beta is not None:
            query *= tl.rsqrt((tl.sum(query * query, 0) + 1e-6) * key_dim)
            key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
            share = tl.sigmoid(tl.load(beta + token * beta_stride + head).to(tl.float32))
            delta = (value - tl.sum(state * key[:, None], 0)) * share
        else:
            delta = value * size
        state += key[:, None] * delta[None, :]
        result = tl.sum(state * query[:, None], 0)
        if skip is not None:
            result += tl.load(skip + head) * value
        tl.store(out + (token * heads + head) * dim + column, result, mask=is_value)
    tl.store(stored, state, mask=inside & (slot >= 0) & (end > start))


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, order: GateOrder) -> Tensor:
    dense = all(supports(each) and each.stride(2) == 1 for each in (x, gate))
    if not dense or x.shape[2] > MAX_DIM:
        return reference.gated_norm(x, gate, weight, eps, order)
    _, groups, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        width = triton.next_power_of_2(dim)
        _normalise_gated[(out.numel() // dim,)](
            out, x, gate, weight, groups, x.stride(0), x.stride(1), gate.stride(0), gate.stride(1),
            dim if weight.dim() == 2 else 0, dim, eps, GATE_FIRST=order == "gate-norm", DIM=width,
            num_warps=min(16, max(1, width // 256)),
        )  # fmt: skip
    return out


@triton.jit
def _normalise_gated(
    out, x, gate, weight, groups, row_stride, group_stride, gate_row_stride, gate_group_stride, weight_stride, dim, eps,
    GATE_FIRST: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """A program per group of a token."""
    item = tl.program_id(0).to(tl.int64)
    token, group = item // groups, item % groups
    column = tl.arange(0, DIM)
    inside = column < dim
    value = tl.load(x + token * row_stride + group * group_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(gate + token * gate_row_stride + group * gate_group_stride + column, mask=inside, other=0.0)
    factor = factor.to(tl.float32)
    factor *= tl.sigmoid(factor)
    if GATE_FIRST:
        value *= factor
    value *= tl.rsqrt(tl.sum(value * value, 0) / dim + eps)
    value *= tl.load(weight + group * weight_stride + column, mask=inside, other=0.0).to(tl.float32)
    if not GATE_FIRST:
        value *= factor
    tl.store(out + item * dim + column, value, mask=inside)
