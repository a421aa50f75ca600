"""The ops of recurrent layers: against transformers' functions, against loops over tokens, and how they use slots."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from localllm.backends.cpu import device as cpu
from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases import CASES
from localllm.kernels.ops.cases.reference_check import call_op, copy_to
from localllm.kernels.ops.cases.state import PADDING, conv_arguments, delta_arguments, ssd_arguments, state_rows
from localllm.kernels.ops.state import Conv, Delta, Ssd, StateRows

LENGTHS = [1, 2, 63, 64, 65, 131]
BOTH = pytest.mark.parametrize("ops", [Ops(), cpu.OPS], ids=["reference", "cpu"])
SCANS = [case for case in CASES if case.op in ("state.gated_delta", "state.ssd") and case.label != "no-rows"]


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """torch.empty returns NaN."""
    torch.manual_seed(5)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def one_row(tokens: int, before: int) -> StateRows:
    """One row, in slot 0."""
    rows = state_rows([(tokens, before)], torch.Generator())
    return StateRows(rows.rows, torch.zeros(1, dtype=torch.int32))


def close(value: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    allowed = tolerance * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(value.float(), expected.float(), rtol=0.0, atol=allowed)


@BOTH
@pytest.mark.parametrize(("heads", "key_heads", "key_dim", "value_dim"), [(4, 2, 32, 16), (3, 3, 24, 40), (8, 1, 8, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_delta_equals_transformers(
    ops: Ops, heads: int, key_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    rates, shift = torch.rand(heads) * 4.0, torch.randn(heads)
    for tokens in LENGTHS:
        query, key = torch.randn(2, tokens, key_heads, key_dim).to(dtype)
        value = torch.randn(tokens, heads, value_dim).to(dtype)
        a, b = torch.randn(2, tokens, heads).to(dtype)
        initial = torch.randn(1, heads, key_dim, value_dim)
        states = initial.clone()
        qkv = torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], dim=1)
        out = ops.state.gated_delta(qkv, a, b, one_row(tokens, 3), Delta(states, rates, shift))
        decay = (-rates * F.softplus(a.float() + shift)).unsqueeze(0)
        for function in (qwen3_next.torch_chunk_gated_delta_rule, qwen3_next.torch_recurrent_gated_delta_rule):
            expected, state = function(
                *(part.unsqueeze(0).float() for part in (query, key, value)),
                decay,
                b.float().sigmoid().unsqueeze(0),
                initial_state=initial,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            close(out, expected[0], 2e-5 if dtype == torch.float32 else 1e-2)
            close(states, state)


@BOTH
@pytest.mark.parametrize(("heads", "groups", "state_dim", "dim"), [(4, 2, 32, 16), (3, 1, 24, 40), (6, 6, 8, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ssd_equals_transformers(
    ops: Ops, heads: int, groups: int, state_dim: int, dim: int, dtype: torch.dtype
) -> None:
    rates, shift, skip = torch.rand(heads) * 4.0, torch.randn(heads), torch.randn(heads)
    for tokens, limits in zip(LENGTHS, [(0.0, torch.inf), (0.1, 0.9)] * 3, strict=True):
        x = torch.randn(tokens, heads, dim).to(dtype)
        b, c = torch.randn(2, tokens, groups, state_dim).to(dtype)
        dt = torch.randn(tokens, heads).to(dtype)
        initial = torch.randn(1, heads, state_dim, dim)
        states = initial.clone()
        packed = torch.cat([x.flatten(1), b.flatten(1), c.flatten(1)], dim=1)
        out = ops.state.ssd(packed, dt, one_row(tokens, 3), Ssd(states, rates, shift, skip, *limits))
        x, b, c, dt = x.float(), b.float(), c.float(), dt.float()
        options = {"D": skip, "dt_bias": shift, "dt_softplus": True}
        expected, state = mamba2.mamba2_chunk_scan(
            *(part.unsqueeze(0) for part in (x, dt)), -rates, b.unsqueeze(0), c.unsqueeze(0), 16,
            initial_states=initial.transpose(2, 3), dt_limit=limits, return_final_states=True, **options,
        )  # fmt: skip
        close(out, expected[0], 2e-5 if dtype == torch.float32 else 1e-2)
        close(states, state.transpose(2, 3))
        if limits[1] < torch.inf:  # their update of one token has no limits
            continue
        state = initial.transpose(2, 3).clone()
        steps = dt.unsqueeze(-1).expand(-1, -1, dim)
        decay = -rates.view(-1, 1, 1).expand(-1, dim, state_dim)
        per_head = {"D": skip.unsqueeze(-1), "dt_bias": shift.unsqueeze(-1), "dt_softplus": True}
        for token in range(tokens):
            one = slice(token, token + 1)
            last = mamba2.mamba2_selective_state_update(state, x[one], steps[one], decay, b[one], c[one], **per_head)
        close(out[-1:], last, 2e-5 if dtype == torch.float32 else 1e-2)
        close(states, state.transpose(2, 3))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_conv_equals_transformers(ops: Ops, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(70, 4).to(dtype), torch.randn(70).to(dtype)
    for tokens in LENGTHS:
        x = torch.randn(tokens, 70).to(dtype)
        history = torch.randn(1, 70, 3).to(dtype)
        states, last = history.transpose(1, 2).float().contiguous(), history.clone()
        out = ops.state.conv(x, one_row(tokens, 3), Conv(weight.t().contiguous(), states, bias))
        expected = qwen3_next.causal_conv1d_update(x.t().unsqueeze(0), last, weight, bias, "silu")
        close(out, expected[0].t(), 2e-5 if dtype == torch.float32 else 2e-2)
        assert torch.equal(states, last.transpose(1, 2).float())
        empty = torch.full((1, 3, 70), torch.nan)
        out = ops.state.conv(x, one_row(tokens, 0), Conv(weight.t().contiguous(), empty, bias))
        expected = qwen3_next.causal_conv1d_fn(x.t().unsqueeze(0), weight, bias, "silu")
        close(out, expected[0].t(), 2e-5 if dtype == torch.float32 else 2e-2)


@BOTH
def test_short_conv_equals_transformers(ops: Ops) -> None:
    layer = Lfm2ShortConv(Lfm2Config(hidden_size=48, conv_L_cache=3, num_hidden_layers=1), 0)
    layer.in_proj = layer.out_proj = torch.nn.Identity()
    for tokens in LENGTHS:
        x = torch.randn(tokens, 3 * 48)
        states = torch.full((1, 2, 48), torch.nan)
        weight = layer.conv.weight.detach().squeeze(1).t().contiguous()
        bias = None if layer.conv.bias is None else layer.conv.bias.detach()
        out = ops.state.short_conv(x, one_row(tokens, 0), Conv(weight, states, bias))
        close(out, layer(x.unsqueeze(0))[0].detach())


@BOTH
def test_gated_norms_equal_transformers(ops: Ops) -> None:
    x, gate = torch.randn(2, 5, 4, 24)
    norm = qwen3_next.Qwen3NextRMSNormGated(24, eps=1e-5)
    grouped = mamba2.MambaRMSNormGated(96, group_size=24, eps=1e-5)
    first = FalconH1RMSNormGated(96, eps=1e-5, n_groups=4, norm_before_gate=True)
    for each in (norm, grouped, first):
        torch.nn.init.normal_(each.weight)
    with torch.no_grad():
        close(ops.state.gated_norm(x, gate, norm.weight, 1e-5, "norm-gate"), norm(x, gate))
        for order, each in (("gate-norm", grouped), ("norm-gate", first)):
            expected = each(x.flatten(1), gate.flatten(1)).view_as(x)
            close(ops.state.gated_norm(x, gate, each.weight.view(4, 24), 1e-5, order), expected)


def loop(case: Any, arguments: dict[str, Any]) -> list[Tensor]:
    """The states and the outputs of a scan, one token of one head after the other."""
    rows, target = arguments["rows"], arguments["target"]
    states, delta = target.states, case.op == "state.gated_delta"
    heads, key_dim, dim = states.shape[1:]
    x = arguments["qkv" if delta else "x"]
    shared = (x.shape[1] - heads * dim) // 2
    sizes = (shared, shared, heads * dim) if delta else (heads * dim, shared, shared)
    parts = x.split(sizes, dim=1)
    query, key, value = parts if delta else (parts[2], parts[1], parts[0])
    step = F.softplus(arguments["a" if delta else "dt"] + target.dt_bias)
    step = step if delta else step.clamp(target.dt_min, target.dt_max)
    out = torch.empty(len(x), heads, dim, dtype=x.dtype)
    for row, slot in enumerate(rows.slots.tolist()):
        begin, end = rows.rows.row_starts[row : row + 2].tolist()
        earlier = int(rows.rows.context_lens[row]) - (end - begin)
        for head in range(heads):
            used = slice(head * shared // heads // key_dim * key_dim, None)
            state = states[slot, head].clone() if slot >= 0 and earlier else torch.zeros_like(states[0, head])
            for token in range(begin, end):
                q, k = (part[token, used][:key_dim] for part in (query, key))
                v = value[token, head * dim : (head + 1) * dim]
                state *= torch.exp(-target.rates[head] * step[token, head])
                if delta:
                    q, k = (part / (part @ part + 1e-6).sqrt() for part in (q, k))
                    state += torch.outer(k, (v - k @ state) * arguments["b"][token, head].sigmoid())
                    out[token, head] = q @ state / key_dim**0.5
                else:
                    state += torch.outer(k, v * step[token, head])
                    out[token, head] = q @ state + target.skip[head] * v
            if slot >= 0 and end > begin:
                states[slot, head] = state
    return [states, out]


@pytest.mark.parametrize("case", SCANS, ids=str)
def test_scan_equals_a_loop_over_tokens(case: Any) -> None:
    arguments = case.make(torch.Generator().manual_seed(1), torch.float32)
    wide = [{name: copy_to(value, "cpu", wide=True) for name, value in arguments.items()} for _ in range(2)]
    results = call_op(case, dict(Ops())[case.op], wide[0])
    for result, expected in zip(results, loop(case, wide[1]), strict=True):
        torch.testing.assert_close(result, expected, rtol=0.0, atol=1e-12 * max(1.0, expected.abs().max().item()))


def slices(arguments: dict[str, Any], row: int, tokens: slice) -> dict[str, Any]:
    """The arguments of a call with some tokens of one row."""
    rows = arguments["rows"]
    begin, end = rows.rows.row_starts[row : row + 2].tolist()
    earlier = int(rows.rows.context_lens[row]) - (end - begin)
    used = range(begin, end)[tokens]
    one = state_rows([(len(used), earlier + used.start - begin)], torch.Generator())
    rest = {name: value[used.start : used.stop] for name, value in arguments.items() if isinstance(value, Tensor)}
    return {**rest, "rows": StateRows(one.rows, rows.slots[row : row + 1]), "target": arguments["target"]}


MAKERS = {
    "state.conv": conv_arguments,
    "state.short_conv": partial(conv_arguments, parts=3),
    "state.gated_delta": delta_arguments,
    "state.ssd": ssd_arguments,
}


@BOTH
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("sizes", [(1,), (7,), (64, 1), (130,)], ids=str)
def test_a_row_in_parts_equals_one_call(ops: Ops, name: str, sizes: tuple[int, ...]) -> None:
    """Also beside other rows. The slots of rows that begin, and of no row, are full of NaN: no row may read them."""
    lens = [(131, 0), (70, 5), (1, PADDING), (1, 2)]
    made = MAKERS[name](lens)(torch.Generator().manual_seed(2), torch.float32)
    slots, states = made["rows"].slots.tolist(), made["target"].states
    states[sorted(set(range(len(states))) - {slots[1], slots[3]})] = torch.nan
    parted = copy_to(made["target"], "cpu")
    expected = dict(ops)[name](**made)
    for row, (count, _) in enumerate(lens):
        for start, size in zip(*parts_of(count, sizes), strict=True):
            given = slices({**made, "target": parted}, row, slice(start, start + size))
            first = int(made["rows"].rows.row_starts[row]) + start
            close(dict(ops)[name](**given), expected[first : first + size])
    assert torch.equal(states.isnan(), parted.states.isnan())
    assert states.isnan().flatten(1).all(1).sum() == len(states) - 3, "the other slots are as they were"
    close(states.nan_to_num(), parted.states.nan_to_num())


def parts_of(count: int, sizes: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Starts and lengths of parts of these sizes, the last size repeated."""
    ends = list(accumulate([*sizes, *[sizes[-1]] * count]))
    ends = sorted({min(end, count) for end in ends})
    starts = [0, *ends[:-1]]
    return starts, [end - start for start, end in zip(starts, ends, strict=True)]
