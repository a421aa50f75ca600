"""The tests of the features in a RunnerSpec pass on the token device, and fail on devices that break a feature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from localllm.engine.batch import Batch
from localllm.engine.request import Request
from localllm.engine.runner import CacheGroup, RunnerSpec, StepResult

from ..engine.token_device import SPEC, Step, TokenDevice, solo
from .conformance import Offers, Planned

DRAFTS = replace(SPEC, max_drafts=4)
WINDOWS = replace(SPEC, max_context=192, max_tokens=16, groups=(CacheGroup(4, 256), CacheGroup(4, 40, window=20)))
STATES = replace(SPEC, groups=(), num_states=4, num_snapshots=4)


class OnTokenDevice(Offers):
    spec: RunnerSpec

    @pytest.fixture
    def runner(self) -> TokenDevice:
        return TokenDevice(self.spec)

    @classmethod
    def walk(cls, prompt: Sequence[int], count: int) -> list[int]:  # type: ignore[override]
        return list(solo(Request("solo", tuple(prompt), count), cls.spec))


class TestDrafts(OnTokenDevice):
    spec = DRAFTS


class TestWindows(OnTokenDevice):
    spec = WINDOWS


class TestStates(OnTokenDevice):
    spec = STATES


class IgnoresDrafts(TokenDevice):
    """Rejects every draft unseen, which changes no token."""

    def compute(self, batch: Batch) -> StepResult:
        result = super().compute(batch)
        starts = result.row_starts
        lengths = np.minimum(np.diff(starts), 1)
        return replace(result, tokens=result.tokens[starts[:-1][lengths > 0]], row_starts=np.cumsum([0, *lengths]))


def test_drafts_that_are_ignored_are_noticed() -> None:
    with pytest.raises(AssertionError):
        TestDrafts().test_drafts_are_verified(Planned(IgnoresDrafts(DRAFTS), overlap=False), 0)


class ForgetsStates(TokenDevice):
    """Restores no snapshot."""

    def run(self, batch: Batch) -> Step:
        return super().run(replace(batch, state_copies=batch.state_copies[:0]))


def test_states_that_are_not_restored_are_noticed() -> None:
    with pytest.raises(AssertionError):
        TestStates().test_prefix_hit_restores_the_state(Planned(ForgetsStates(STATES), overlap=False))
