"""Caches and models of mlx-lm as adapted: masks, windows and hidden states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask

from localllm.backends.mlx.adapter import BatchCache, Forward, RowCache, probe_layers
from localllm.engine.errors import ModelRefused

pytestmark = pytest.mark.real_otherdevice


def append(cache: Any, new: int, values: int = 0) -> Any:
    """Add positions whose key is their number, from `values` on. Returns the keys that attention reads."""
    rows = cache.left_padding.size if isinstance(cache, BatchCache) else 1
    keys = mx.broadcast_to(mx.arange(values, values + new)[None, None, :, None], (rows, 1, new, 1))
    return cache.update_and_fetch(keys, keys)[0]


def row(length: int, window: int = 0) -> RowCache:
    cache = RowCache(window)
    append(cache, length)
    return cache


def visible(mask: Any, keys: mx.array, new: int) -> list[list[list[int]]]:
    """The keys that each new token of each row sees."""
    rows, columns = keys.shape[0], keys.shape[2]
    if isinstance(mask, str) or mask is None:
        assert (mask is None) == (new == 1)
        mask = mx.tri(new, columns, columns - new, mx.bool_)
    complete = np.array(mx.broadcast_to(mask, (rows, 1, new, columns)))[:, 0]
    return [[np.array(keys)[index, 0, token, 0].tolist() for token in complete[index]] for index in range(rows)]


def expected_keys(positions: int, new: int, window: int) -> list[list[int]]:
    """The keys that new tokens after `positions` others should see."""
    ends = range(positions + 1, positions + new + 1)
    return [list(range(max(0, end - window) if window else 0, end)) for end in ends]


@pytest.mark.parametrize("window", [0, 1, 4, 50])
@pytest.mark.parametrize("new", [1, 3, 9])
@pytest.mark.parametrize("length", [0, 1, 3, 12])
def test_row_sees_its_window(length: int, new: int, window: int) -> None:
    cache = row(length, window) if length else RowCache(window)
    mask = create_attention_mask(mx.zeros((1, new, 1)), cache)
    keys = append(cache, new, length)
    assert visible(mask, keys, new) == [expected_keys(length, new, window)]
    assert new > 1 or mask is None, "a decode step has no mask"


@pytest.mark.parametrize("window", [0, 1, 4, 50])
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("lengths", [(12, 3), (2, 7, 5), (6, 6)], ids=str)
def test_rows_of_a_batch_see_their_windows(lengths: tuple[int, ...], new: int, window: int) -> None:
    cache = BatchCache.of([row(length, window) for length in lengths])
    mask = create_attention_mask(mx.zeros((len(lengths), new, 1)), cache)
    keys = append(cache, new, 100)
    actual = visible(mask, keys, new)
    for length, tokens in zip(lengths, actual, strict=True):
        expected = [
            [100 + key - length if key >= length else key for key in keys]
            for keys in expected_keys(length, new, window)
        ]
        assert tokens == expected
    assert (mask is None) == (len(set(lengths)) == 1 and new == 1)


def test_narrower_window_of_cache_and_layer_counts() -> None:
    """A layer passes its window to a cache without a window or with a wider one."""
    for window in (0, 9):
        cache = row(12, window)
        mask = create_attention_mask(mx.zeros((1, 1, 1)), cache, window_size=5)
        assert visible(mask, append(cache, 1, 12), 1) == [expected_keys(12, 1, 5)]


def test_row_of_a_batch_keeps_its_window() -> None:
    cache = BatchCache.of([row(3, 4), row(8, 4)]).row(0, 3)
    assert (cache.offset, cache.window) == (3, 4)
    assert np.array(cache.keys)[0, 0, :, 0].tolist() == [0, 1, 2]


class Trunk(nn.Module):
    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return mx.stack([tokens, 2 * tokens], axis=-1)


class Model(nn.Module):
    """The logits are the negated hidden states."""

    def __init__(self, trunk: bool) -> None:
        super().__init__()
        self.layers: list[nn.Module] = []
        self.widths = list[int]()
        if trunk:
            self.model = Trunk()

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        hidden = self.model(tokens, cache) if "model" in self else Trunk()(tokens)
        self.widths.append(hidden.shape[1])
        return -hidden


def test_only_last_tokens_go_through_the_head() -> None:
    model = Model(trunk=True)
    logits, hidden = Forward(model)(mx.array([[1, 2, 3], [4, 5, 6]]), [])
    assert logits.tolist() == [[-3, -6], [-6, -12]]
    assert hidden.tolist() == [[3, 6], [6, 12]]
    assert model.widths == [1]


def test_a_model_without_a_trunk_has_no_hidden_states() -> None:
    logits, hidden = Forward(Model(trunk=False))(mx.array([[1, 2, 3]]), [])
    assert logits.tolist() == [[-3, -6]]
    assert hidden.shape == (1, 0)


def test_layers_without_keys_and_values_are_refused() -> None:
    model = Model(trunk=True)
    forward = Forward(model)
    assert probe_layers(model, forward) == []
    model.layers = [nn.Identity()]
    with pytest.raises(ModelRefused, match="stores no keys and values"):
        probe_layers(model, forward)
