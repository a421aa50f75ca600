"""Steps in the frame of a capture: the rows of the step, then inert rows, whatever the frame had before."""

from __future__ import annotations

import numpy as np
import torch

from localllm.backends.cpu.device import DEVICE
from localllm.backends.pytorch.inputs import Inputs, Sent
from localllm.engine.batch import Batch, Want
from localllm.engine.request import Sampling
from localllm.engine.runner import CacheGroup, RunnerSpec

from .batches import Row, make_batch

SPEC = RunnerSpec(96, max_tokens=64, max_rows=8, max_context=64, groups=(CacheGroup(4, 99),), graph_rows=(8,))


def batch_of(rows: int, start: int) -> Batch:
    sampling = Sampling(temperature=0.5, top_k=7, top_p=0.9, seed=2**63 + 5)
    row_pages = [range(1 + 9 * at, 1 + 9 * at + 1 + (start + at) // 4) for at in range(rows)]
    return make_batch([Row([at + 1], start + at, row_pages[at], carry=at, sampling=sampling) for at in range(rows)], 96)


def held(frame: Sent) -> dict[str, list]:
    """All arrays that depend on the step."""
    step, carried = frame.step, frame.carried
    assert carried is not None
    columns = {
        "tokens": step.tokens,
        "positions": step.positions,
        "slots": step.slots,
        "contexts": step.rows.context_lens,
        "carry": carried.carry,
        "table": step.rows.page_table,
        **frame.settings,
    }
    return {name: column.tolist() for name, column in columns.items()}


def test_padded_rows_are_inert() -> None:
    inputs = Inputs(SPEC, DEVICE)
    frame = inputs.frame(8)
    empty = held(frame)
    inputs.fill(batch_of(8, 20), 8)
    assert not set(held(frame)["contexts"]) & set(empty["contexts"])
    inputs.fill(batch_of(3, 11), 8)
    result, expected = held(frame), batch_of(3, 11)
    for name in ("tokens", "positions", "carry"):
        assert result[name] == [*getattr(expected, name).tolist(), *empty[name][3:]]
    assert result["contexts"] == [12, 13, 14, 1, 1, 1, 1, 1]
    width = expected.page_tables[0].shape[1]
    table = np.array(result["table"])
    assert (table[:3, :width] == expected.page_tables[0]).all()
    assert (table[3:, :width] == 0).all()
    pages = expected.page_tables[0][np.arange(3), expected.positions // 4]
    assert result["slots"] == [*(pages * 4 + expected.positions % 4).tolist(), 0, 0, 0, 0, 0]
    assert result["temperature"] == [0.5, 0.5, 0.5, 0, 0, 0, 0, 0]
    assert result["top_p"][:3] == torch.tensor([0.9] * 3).tolist()
    assert result["seed_low"][:3] == [5, 5, 5]
    assert result["seed_high"][:3] == [-(2**31)] * 3


def test_unchanged_page_table_is_not_copied() -> None:
    inputs = Inputs(SPEC, DEVICE)
    frame = inputs.frame(8)
    batch = batch_of(3, 11)
    inputs.fill(batch, 8)
    frame.step.rows.page_table.fill_(77)
    inputs.fill(batch, 8)
    assert frame.step.rows.page_table[0, 0] == 77
    inputs.frame(4)
    inputs.fill(batch, 8)
    assert frame.step.rows.page_table[0, 0] == 1, "another frame lies in the same place"


def test_last_rows_have_the_rows_with_a_sample() -> None:
    """The numbers on the host equal those on the device, because kernels use both."""
    starts, wants = (0, 8, 20, 3), (Want.NOTHING, Want.TOKEN, Want.NOTHING, Want.HIDDEN)
    rows = [
        Row([1] * (2 + at), start, range(1 + 9 * at, 10 + 9 * at), want=want)
        for at, (start, want) in enumerate(zip(starts, wants, strict=True))
    ]
    for asked in (rows, rows[1::2]):
        sampled = [row for row in asked if row.want]
        step = Inputs(SPEC, DEVICE).send(make_batch(asked, 96)).last_only()
        result = step.last_rows
        assert result is not None
        assert result.contexts == tuple(row.start + len(row.tokens) for row in sampled)
        assert result.context_lens.tolist() == list(result.contexts)
        assert result.page_table.tolist() == [list(row.pages) for row in sampled]
        assert result.query_lens == (1,) * len(sampled)
        assert result.row_starts.tolist() == list(range(len(sampled) + 1))
        assert len(step.last) == len(sampled)


def test_fetched_values_survive_the_next_step() -> None:
    computed = torch.arange(3)
    fetched = DEVICE.fetch(computed)
    computed.zero_()
    assert fetched.tolist() == [0, 1, 2]
