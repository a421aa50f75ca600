"""Triton kernels name no vendor, and each stream has its own counters."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm import kernels

pytest.importorskip("triton")
from localllm.kernels.triton import target

FOLDER = Path(next(iter(kernels.__path__))) / "triton"
VENDOR = re.compile(
    r"torch\.(cuda|xpu|hip|npu|version)\b|\bis_(cuda|xpu|hip)\b|torch\._C\b|\b(NVIDIA|AMD|Intel|ROCm|Hopper|PTX|ptx)\b"
    r"|[\"'](cuda|hip|xpu)[\"']|\bgfx\d|\bsm_\d|\bcapability\b|\.(backend|arch)\b"
)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.name)
def test_triton_kernels_name_no_vendor(file: Path) -> None:
    """Only the table of targets does, and the folder of a vendor."""
    named = {match[0] for match in VENDOR.finditer(file.read_text())}
    assert bool(named) == (file.name == "target.py"), named


FLOAT = torch.__version__ >= "2.10"


@pytest.mark.parametrize(
    ("backend", "arch", "fields"),
    [
        ("cuda", 80, {"precision": "tf32", "assembly": True, "float_sums": True, "integer_sums": True}),
        ("cuda", 89, {"fp8": torch.float8_e4m3fn, "descriptors": False, "overlaps": False}),
        ("cuda", 90, {"fp8": torch.float8_e4m3fn, "descriptors": True, "overlaps": True, "narrow": False}),
        ("cuda", 120, {"descriptors": False, "overlaps": True, "lanes": 32}),
        ("hip", "gfx90a", {"lanes": 64, "fp8": None, "precision": "ieee", "narrow": False, "integer_sums": True}),
        ("hip", "gfx942", {"lanes": 64, "fp8": torch.float8_e4m3fnuz, "assembly": False, "float_sums": FLOAT}),
        ("hip", "gfx950", {"lanes": 64, "fp8": torch.float8_e4m3fn, "narrow": False}),
        ("hip", "gfx1100", {"lanes": 32, "fp8": None, "operands": 8 << 10, "narrow": True, "in_registers": True}),
        ("hip", "gfx1151", {"lanes": 32, "fp8": None, "narrow": True, "integer_sums": False}),
        ("hip", "gfx1201", {"lanes": 32, "fp8": torch.float8_e4m3fn, "narrow": True, "integer_sums": False}),
        ("xpu", {"sub_group_sizes": [16, 32]}, {"lanes": 16, "precision": "ieee", "assembly": False, "narrow": True}),
        ("xpu", {"sub_group_sizes": [8, 16, 32]}, {"lanes": 8, "float_sums": False, "integer_sums": False}),
    ],
    ids=str,
)
def test_targets(backend: str, arch: Any, fields: dict[str, Any]) -> None:
    found = target.target_of(backend, arch)
    assert {name: getattr(found, name) for name in fields} == fields


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
