"""Recurrent layers: causal convolutions, Gated DeltaNet (Yang et al., 2024), Mamba2 (Dao & Gu, 2024), gated norms.

Both recurrences keep a matrix S [key dim, value dim] for each head. A token multiplies it by a decay, adds the outer
product of a key and a value, and reads it with a query:

    S_t = decay_t * S_{t-1} + key_t ⊗ value_t        output_t = query_tᵀ S_t

Mamba2 has B as key, C as query and dt * x as value. The delta rule adds beta_t * (value_t - key_tᵀ decay_t S_{t-1}) in
place of value_t: it replaces the value that the state has for this key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention import Rows

CHUNK = 64  # tokens of a row that `_scan` computes with matrix products
L2_EPS = 1e-6

GateOrder = Literal["norm-gate", "gate-norm"]


@dataclass(frozen=True)
class StateRows:
    """The rows of a step, and their state slots. A row whose tokens begin at position 0 begins with the empty state,
    all zeros. A row without a slot (padding) does so too, and no state is written for it or for a row without tokens.
    """

    rows: Rows  # its page table is not used
    slots: Tensor  # [rows] int32, all different; -1: no slot

    @property
    def lengths(self) -> Tensor:
        """[rows] number of tokens of each row."""
        return self.rows.row_starts[1:] - self.rows.row_starts[:-1]

    @property
    def is_stored(self) -> Tensor:
        """[rows] bool: the row's state is written."""
        return (self.slots >= 0) & (self.lengths > 0)

    @property
    def continues(self) -> Tensor:
        """[rows] bool: the row begins with the state of its slot."""
        return (self.slots >= 0) & (self.rows.context_lens > self.lengths)

    def read(self, states: Tensor, members: slice = slice(None)) -> Tensor:
        """The states [rows, …] with which rows begin; states [slots, …]."""
        stored = states.index_select(0, self.slots[members].clamp(min=0))
        continues = self.continues[members].view(-1, *[1] * (states.dim() - 1))
        return torch.where(continues, stored, 0.0)

    def write(self, states: Tensor, new: Tensor, members: slice = slice(None)) -> None:
        """Write the new states [rows, …] to the slots. Reads no device value, so that a graph can capture it: a row
        that stores nothing repeats the write of another row, or writes what slot 0 has already."""
        is_stored = self.is_stored[members]
        order = torch.arange(len(new), device=new.device)
        sources = torch.where(is_stored, order, is_stored.int().argmax())
        targets = self.slots[members].index_select(0, sources).clamp(min=0).long()
        is_stored = is_stored.index_select(0, sources).view(-1, *[1] * (states.dim() - 1))
        new = new.index_select(0, sources).to(states.dtype)
        states.index_copy_(0, targets, torch.where(is_stored, new, states.index_select(0, targets)))


class Conv(NamedTuple):
    """The arguments of a causal convolution that belong to a layer. They are the same in every step."""

    weight: Tensor  # [width, channels], the last row for the newest token
    states: Tensor  # [slots, width - 1, channels] float32: the last inputs of each sequence, the newest last
    bias: Tensor | None = None  # [channels]


class Delta(NamedTuple):
    """The arguments of Gated DeltaNet that belong to a layer."""

    states: Tensor  # [slots, value heads, key dim, value dim] float32
    rates: Tensor  # [value heads] float32, exp(A_log)
    dt_bias: Tensor  # [value heads] float32


class Ssd(NamedTuple):
    """The arguments of a Mamba2 scan (state space duality) that belong to a layer."""

    states: Tensor  # [slots, heads, state dim, head dim] float32
    rates: Tensor  # [heads] float32, exp(A_log)
    dt_bias: Tensor  # [heads] float32
    skip: Tensor  # [heads] float32, D: the share of x that is added to the output
    dt_min: float = 0.0
    dt_max: float = float("inf")


def conv(x: Tensor, rows: StateRows, target: Conv) -> Tensor:
    """silu of the causal convolution of each channel over the tokens of its row -> [tokens, channels], as x.

    x [tokens, channels]. Writes the last inputs of each row to `target.states`.
    """
    return F.silu(_causal(_widened(x), rows, target)).to(x.dtype)


def short_conv(x: Tensor, rows: StateRows, target: Conv) -> Tensor:
    """c * causal convolution of (b * y) over the tokens of its row (LFM2, 2025) -> [tokens, channels], of x's dtype.

    x [tokens, 3 * channels]: b, c and y. Writes the last inputs b * y of each row to `target.states`.
    """
    before, after, y = _widened(x).chunk(3, dim=1)
    return (after * _causal(before * y, rows, target)).to(x.dtype)


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _causal(x: Tensor, rows: StateRows, target: Conv) -> Tensor:
    """x [tokens, channels] -> [tokens, channels]. A row reads the sequence of its state and its tokens: token t of the
    row is at index width - 1 + t."""
    if not len(x):
        return x
    history = len(target.weight) - 1
    weight = target.weight.to(x.dtype)
    initial = rows.read(target.states).to(x.dtype)
    starts = rows.rows.row_starts
    token = torch.arange(len(x), device=x.device)
    row = torch.searchsorted(starts[1:], token, right=True)

    def element(row: Tensor, index: Tensor) -> Tensor:
        """The elements at `index` of the sequences of `row`."""
        inside = (starts[row] + index - history).clamp(0, len(x) - 1)
        return torch.where((index >= history).unsqueeze(-1), x[inside], initial[row, index.clamp(max=history - 1)])

    first = token - starts[row]
    taps = [element(row, first + tap) * weight[tap] for tap in range(history)]
    out = torch.stack([*taps, x * weight[history]]).sum(0)
    every_row = torch.arange(len(rows.slots), device=x.device).unsqueeze(1)
    last = rows.lengths.unsqueeze(1) + torch.arange(history, device=x.device)
    rows.write(target.states, element(every_row, last))
    return out if target.bias is None else out + target.bias.to(x.dtype)


def gated_delta(qkv: Tensor, a: Tensor, b: Tensor, rows: StateRows, target: Delta) -> Tensor:
    """Gated DeltaNet -> [tokens, value heads, value dim], of qkv's dtype. Writes `target.states`.

    qkv [tokens, 2 * key heads * key dim + value heads * value dim]: queries, keys, values. Neighbouring value heads
    share a key head. Queries and keys are divided by their length, queries also by the root of their dimension. a and b
    [tokens, value heads]: the decay of a token is exp(-rates * softplus(a + dt_bias)), beta is sigmoid(b).
    """
    _, heads, key_dim, value_dim = target.states.shape
    keys = (qkv.shape[1] - heads * value_dim) // 2
    query, key, value = _widened(qkv).split((keys, keys, heads * value_dim), dim=1)
    query, key = (_unit(part.unflatten(1, (-1, key_dim))) for part in (query, key))
    decay = -target.rates * F.softplus(_widened(a) + target.dt_bias)
    beta = _widened(b).sigmoid()
    value = value.unflatten(1, (heads, value_dim))
    return _scan([query * key_dim**-0.5, key, value, decay, beta], rows, target.states).to(qkv.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def ssd(x: Tensor, dt: Tensor, rows: StateRows, target: Ssd) -> Tensor:
    """The scan of Mamba2 -> [tokens, heads, head dim], of x's dtype. Writes `target.states`.

    x [tokens, heads * head dim + 2 * groups * state dim]: x, B and C. Neighbouring heads share a group of B and C.
    dt [tokens, heads]: the step size is softplus(dt + dt_bias), clamped to dt_min…dt_max. The decay of a token is
    exp(-rates * step size).
    """
    _, heads, state_dim, head_dim = target.states.shape
    groups = (x.shape[1] - heads * head_dim) // 2
    inputs, key, query = _widened(x).split((heads * head_dim, groups, groups), dim=1)
    inputs = inputs.unflatten(1, (heads, head_dim))
    key, query = (part.unflatten(1, (-1, state_dim)) for part in (key, query))
    step = F.softplus(_widened(dt) + target.dt_bias).clamp(target.dt_min, target.dt_max)
    value = inputs * step.unsqueeze(-1)
    out = _scan([query, key, value, -target.rates * step], rows, target.states)
    return out.add(inputs * target.skip.unsqueeze(-1)).to(x.dtype)


def _scan(parts: list[Tensor], rows: StateRows, states: Tensor) -> Tensor:
    """The recurrence over the tokens of each row -> [tokens, heads, value dim].

    parts: query and key [tokens, key heads, key dim], value [tokens, heads, value dim], the logarithm of the decay
    [tokens, heads]; for the delta rule beta [tokens, heads].
    """
    query, key, value, *rates = parts
    out = torch.empty_like(value)
    shared = value.shape[1] // key.shape[1]
    parts = [query.repeat_interleave(shared, dim=1), key.repeat_interleave(shared, dim=1), value, *rates]
    for members, tokens, length in rows.rows.runs():
        if length:
            # [rows, heads, tokens of a row, …]
            by_head = [part[tokens].unflatten(0, (-1, length)).transpose(1, 2) for part in parts]
            state = rows.read(states, members).to(value.dtype)
            results = []
            for chunk in zip(*(part.split(CHUNK, dim=2) for part in by_head), strict=True):
                result, state = _chunk(state, *chunk)
                results.append(result)
            rows.write(states, state, members)
            out[tokens] = torch.cat(results, dim=2).transpose(1, 2).flatten(0, 1)
    return out


def _chunk(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Some tokens of each row: the outputs [rows, heads, tokens, value dim] and the new state.

    The delta of a token depends on the deltas of the tokens before it: a triangular system (Yang et al., 2024).
    """
    tokens = decay.shape[2]
    total = decay.cumsum(-1)  # logarithm of the decay from before the chunk to each token
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=total.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    since_start = total.exp().unsqueeze(-1)
    until_end = (total[..., -1:] - total).exp().unsqueeze(-1)
    if beta is not None:
        beta = beta.unsqueeze(-1)
        value = beta * (value - since_start * (key @ state))
        if tokens > 1:  # one token has no token before it, and not every device can capture the solver
            system = beta * (key @ key.transpose(-1, -2)) * between
            value = torch.linalg.solve_triangular(system, value, upper=False, unitriangular=True)
    out = since_start * (query @ state) + (query @ key.transpose(-1, -2) * between) @ value
    state = state * since_start[..., -1:, :] + (key * until_end).transpose(-1, -2) @ value
    return out, state


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, order: GateOrder) -> Tensor:
    """rms_norm(x) * weight * silu(gate) for norm-gate, rms_norm(x * silu(gate)) * weight for gate-norm.

    x and gate [tokens, groups, dim], normalised over the last dimension; weight [dim] or [groups, dim]. Computed in
    float32 at least, rounded once; the output has x's shape and dtype.
    """
    wide = _widened(x)
    factor = F.silu(_widened(gate))
    if order == "gate-norm":
        wide = wide * factor
    wide = F.rms_norm(wide, x.shape[-1:], eps=eps) * weight.to(wide.dtype)
    return (wide * factor if order == "norm-gate" else wide).to(x.dtype)


@dataclass(frozen=True, slots=True)
class State:
    """The implementations of recurrent layers on a device."""

    conv: Callable[[Tensor, StateRows, Conv], Tensor] = conv
    short_conv: Callable[[Tensor, StateRows, Conv], Tensor] = short_conv
    gated_delta: Callable[[Tensor, Tensor, Tensor, StateRows, Delta], Tensor] = gated_delta
    ssd: Callable[[Tensor, Tensor, StateRows, Ssd], Tensor] = ssd
    gated_norm: Callable[[Tensor, Tensor, Tensor, float, GateOrder], Tensor] = gated_norm
