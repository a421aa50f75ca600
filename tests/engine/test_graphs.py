from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from localllm.engine.batch import Batch, SamplingRows, Want
from localllm.engine.engine import Engine
from localllm.engine.graphs import Shape, bucket, choose_shape, pad
from localllm.engine.request import Request, Sampling

from .token_device import SPEC, TokenDevice


def batch_of(*prompts: int, sampling: Sampling = Sampling()) -> Batch:
    """A batch of whole prompts of these lengths."""
    device = TokenDevice(SPEC)
    engine = Engine(device)
    for index, length in enumerate(prompts):
        engine.submit(Request(str(index), tuple(range(1, length + 1)), 4, sampling))
    engine.step()
    return device.batches[0]


@pytest.mark.parametrize(("size", "found"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, None)])
def test_bucket(size: int, found: int | None) -> None:
    assert bucket(size, (1, 2, 4, 8)) == found


@pytest.mark.parametrize(
    ("prompts", "rows", "tokens", "shape"),
    [
        ((1, 1, 1), (1, 2, 4), (1, 2, 4), Shape(4, 4)),
        ((1, 1), (1, 2, 4), (1, 2, 4), Shape(2, 2)),
        ((1, 3), (2, 4), (8, 16), Shape(4, 8)),  # spare tokens need a row to lie in
        ((1, 3), (2, 4), (4, 8), Shape(2, 4)),
        ((5,), (1, 2), (4,), None),
        ((1, 1, 1), (1, 2), (4,), None),
        ((1, 6), (2,), (8,), None),
        ((4, 4), (3, 8), (8, 9), Shape(3, 9)),
    ],
)
def test_the_smallest_shape_is_chosen(prompts, rows, tokens, shape) -> None:
    batch = batch_of(*prompts)
    assert choose_shape(batch, rows, tokens) == shape
    if shape is not None:
        padded = pad(batch, *shape, page_size=SPEC.page_size)
        assert (padded.num_rows, padded.num_tokens) == shape


def test_own_rows_stay_and_the_others_are_inert() -> None:
    batch = batch_of(3, 6, sampling=Sampling(temperature=1.0, top_k=3, logprobs=2, presence_penalty=1.0))
    padded = pad(batch, rows=5, tokens=32, page_size=SPEC.page_size)
    assert padded.row_starts.tolist() == [0, 3, 9, 10, 11, 32]
    assert padded.positions.tolist() == [*range(3), *range(6), 0, 0, *range(21)]
    assert (padded.tokens[9:] == 0).all()
    assert padded.page_table.shape == (5, 6)
    assert (padded.page_table[2:] == 0).all()
    assert (padded.page_table[:2, : batch.page_table.shape[1]] == batch.page_table).all()
    assert padded.wants.tolist() == [Want.TOKEN] * 2 + [Want.NOTHING] * 3
    assert padded.carry.tolist() == [-1] * 5
    assert padded.adapters.tolist() == [0] * 5
    for field in fields(SamplingRows):
        before, after = getattr(batch.sampling, field.name), getattr(padded.sampling, field.name)
        assert after.dtype == before.dtype
        assert (after[: len(before)] == before).all()
        assert len(after) == (len(before) if field.name.startswith(("bias", "history")) else 5)
    assert padded.sampling.temperature[2:].tolist() == [0, 0, 0]
    assert padded.sampling.top_p[2:].tolist() == [1, 1, 1]
    assert padded.sampling.repetition_penalty[2:].tolist() == [1, 1, 1]
    assert padded.sampling.logprobs[2:].tolist() == [-1, -1, -1]


def test_a_padded_step_gives_the_same_tokens() -> None:
    batch = batch_of(3, 6)
    plain, padded = (
        TokenDevice(SPEC).compute(each) for each in (batch, pad(batch, rows=4, tokens=20, page_size=SPEC.page_size))
    )
    assert padded.tokens[:2].tolist() == plain.tokens.tolist()


def test_the_shape_itself_needs_no_padding() -> None:
    batch = batch_of(3, 6)
    assert pad(batch, rows=2, tokens=9) is batch


@pytest.mark.parametrize(("rows", "tokens"), [(1, 9), (2, 8), (2, 10), (4, 10), (3, 9)])
def test_shapes_that_do_not_hold_it_are_refused(rows: int, tokens: int) -> None:
    with pytest.raises(ValueError, match=f"2 rows and 9 tokens does not fit {rows} rows, {tokens} tokens"):
        pad(batch_of(3, 6), rows, tokens)


def test_slots_have_no_page_table_to_widen() -> None:
    batch = replace(batch_of(2), page_table=np.zeros((1, 0), np.int32), slots=np.zeros(1, np.int32))
    padded = pad(batch, rows=2, tokens=30)
    assert padded.page_table.shape == (2, 0)
    assert padded.slots.tolist() == [0, -1]
