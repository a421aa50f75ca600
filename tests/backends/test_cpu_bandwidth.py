"""The measured memory bandwidth, which `localllm doctor` and the benchmarks use as a bound."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.backends.cpu import bandwidth


def test_bandwidth_is_the_best_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 2.0, 3.0, 3.0, 6.0, 6.0, 10.0])
    sizes: list[int] = []
    monkeypatch.setattr(bandwidth, "PER_THREAD", 1024)
    monkeypatch.setattr(bandwidth, "cores", lambda: 3)
    monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(np, "max", lambda block: sizes.append(block.nbytes))
    assert bandwidth.read_bandwidth() == 3 * 1024
    assert sizes == [1024] * 3 * bandwidth.PASSES
