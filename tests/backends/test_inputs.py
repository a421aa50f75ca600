"""Steps in the place of a recording: own rows as they are, and inert ones after them whatever was there before."""

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
    own = [range(1 + 9 * at, 1 + 9 * at + 1 + (start + at) // 4) for at in range(rows)]
    return make_batch([Row([at + 1], start + at, own[at], carry=at, sampling=sampling) for at in range(rows)], 96)


def held(frame: Sent) -> dict[str, list]:
    """Everything that depends on the step."""
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


def test_rows_that_a_step_has_not_are_inert() -> None:
    inputs = Inputs(SPEC, DEVICE)
    frame = inputs.frame(8)
    empty = held(frame)
    inputs.fill(batch_of(8, 20), 8)
    assert not set(held(frame)["contexts"]) & set(empty["contexts"])
    inputs.fill(batch_of(3, 11), 8)
    found, expected = held(frame), batch_of(3, 11)
    for name in ("tokens", "positions", "carry"):
        assert found[name] == [*getattr(expected, name).tolist(), *empty[name][3:]]
    assert found["contexts"] == [12, 13, 14, 1, 1, 1, 1, 1]
    width = expected.page_tables[0].shape[1]
    table = np.array(found["table"])
    assert (table[:3, :width] == expected.page_tables[0]).all()
    assert (table[3:, :width] == 0).all()
    pages = expected.page_tables[0][np.arange(3), expected.positions // 4]
    assert found["slots"] == [*(pages * 4 + expected.positions % 4).tolist(), 0, 0, 0, 0, 0]
    assert found["temperature"] == [0.5, 0.5, 0.5, 0, 0, 0, 0, 0]
    assert found["top_p"][:3] == torch.tensor([0.9] * 3).tolist()
    assert found["seed_low"][:3] == [5, 5, 5]
    assert found["seed_high"][:3] == [-(2**31)] * 3


def test_a_table_that_is_there_already_is_not_sent_again() -> None:
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


def test_the_last_layer_is_told_of_the_rows_that_are_answered() -> None:
    """On the host as on the device: kernels plan by the one and read the other."""
    starts, wants = (0, 8, 20, 3), (Want.NOTHING, Want.TOKEN, Want.NOTHING, Want.HIDDEN)
    rows = [
        Row([1] * (2 + at), start, range(1 + 9 * at, 10 + 9 * at), want=want)
        for at, (start, want) in enumerate(zip(starts, wants, strict=True))
    ]
    for asked in (rows, rows[1::2]):
        answered = [row for row in asked if row.want]
        step = Inputs(SPEC, DEVICE).send(make_batch(asked, 96)).last_only()
        found = step.last_rows
        assert found is not None
        assert found.contexts == tuple(row.start + len(row.tokens) for row in answered)
        assert found.context_lens.tolist() == list(found.contexts)
        assert found.page_table.tolist() == [list(row.pages) for row in answered]
        assert found.query_lens == (1,) * len(answered)
        assert found.row_starts.tolist() == list(range(len(answered) + 1))
        assert len(step.last) == len(answered)


def test_what_is_fetched_stays_when_the_next_step_is_computed() -> None:
    computed = torch.arange(3)
    fetched = DEVICE.fetch(computed)
    computed.zero_()
    assert fetched.tolist() == [0, 1, 2]
