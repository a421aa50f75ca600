"""Triton kernels name no vendor, and each stream has its own counters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from localllm import kernels

pytest.importorskip("triton")
from localllm.kernels.triton import target

FOLDER = Path(next(iter(kernels.__path__))) / "triton"
VENDOR = re.compile(r"torch\.(cuda|xpu|hip|npu|version)\b|\.is_(cuda|xpu|hip)\b|torch\._C\b")


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.name)
def test_triton_kernels_name_no_vendor(file: Path) -> None:
    assert VENDOR.findall(file.read_text()) == []


def test_each_stream_has_its_own_counters() -> None:
    counters = target.Counters(torch.device("cpu"), 8)
    one, other = counters.row(7), counters.row(9)
    one.fill_(1)
    assert other.sum() == 0
    assert counters.row(7) is one
    assert one.shape == other.shape == (8,)


def test_streams_beyond_the_last_are_refused() -> None:
    counters = target.Counters(torch.device("cpu"), 8)
    for stream in range(target.STREAMS):
        counters.row(stream)
    assert counters.row(3) is counters.row(3)
    with pytest.raises(RuntimeError, match="32 streams"):
        counters.row(target.STREAMS)
