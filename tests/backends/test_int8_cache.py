"""The references of an int8 KV cache, with a scale for each head of a token."""

from __future__ import annotations

import pytest
import torch

from localllm.kernels.ops.attention import Attend, Rows, paged_attention
from localllm.kernels.ops.kv import Append, append

PAGE, KV_HEADS, DIM = 4, 2, 32


@pytest.mark.parametrize(("queries", "context"), [(1, 7), (3, 7)])
def test_each_head_of_a_token_has_its_own_scale(queries: int, context: int) -> None:
    """Heads whose sizes differ by 10,000 all have the error of 8 bits."""
    generator = torch.Generator().manual_seed(1)
    pages = torch.zeros(2, 4, PAGE, KV_HEADS, DIM, dtype=torch.int8)
    scales = torch.full((2, 4, KV_HEADS, PAGE), float("nan"))
    sizes = 10.0 ** torch.linspace(-2, 2, context * KV_HEADS).view(context, KV_HEADS, 1)
    key = torch.randn(context, KV_HEADS, DIM, generator=generator)
    value = torch.randn(context, KV_HEADS, DIM, generator=generator) * sizes
    table = torch.tensor([[3, 1]])
    positions = torch.arange(context)
    slots = table[0, positions // PAGE] * PAGE + positions % PAGE
    one = torch.ones(context, DIM // 2)
    append(torch.cat((key, value), dim=1), one, one * 0, slots, Append(pages[0], pages[1], "neox", scales=scales))
    query = torch.randn(queries, 4, DIM, generator=generator)
    starts, lens = torch.tensor([0, queries]), torch.tensor([context])
    rows = Rows(starts.int(), lens.int(), table.int(), (queries,), (context,))
    result = paged_attention(query, rows, Attend(pages[0], pages[1], 0.2, scales=scales))
    floats = torch.zeros(2, 4 * PAGE, KV_HEADS, DIM)
    floats[:, slots] = torch.stack((key, value))
    whole = floats.view(2, 4, PAGE, KV_HEADS, DIM)
    expected = paged_attention(query, rows, Attend(whole[0], whole[1], 0.2))
    for head in range(4):
        error = (result[:, head] - expected[:, head]).abs().max() / expected[:, head].abs().max()
        assert error < 0.03
