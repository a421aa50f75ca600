"""The batches that FlashInfer's attention computes and those of the fallback. A stand-in replaces FlashInfer."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from localllm.kernels.ops.attention import Attend, Attention, Rows

NAME = "localllm.kernels.flashinfer.attention"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The implementation that computes the batch: "ours" (the fallback) or "theirs" (FlashInfer)."""
    stand_in = ModuleType("flashinfer.prefill")
    stand_in.BatchPrefillWithPagedKVCacheWrapper = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", stand_in)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    module = importlib.import_module(NAME)

    class Planned:
        def run(self, *_: Any, out: Any) -> str:
            return "theirs"

    monkeypatch.setattr(module, "_planned", lambda rows, options: Planned())

    def of(
        dim: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        cache: torch.dtype | None = None,
        exact: bool = True,
        sinks: bool = False,
        apart: bool = False,
    ) -> Any:
        pages = torch.zeros(2, 3, 4, 1, dim + 8 * apart).to(cache or dtype)[..., :dim]
        one = torch.ones(1, dtype=torch.int32)
        rows = Rows(torch.tensor([0, 1]).int(), one, one.view(1, 1), (1,), (1,), exact)
        ours = Attention(paged=lambda *_: "ours")  # type: ignore[arg-type,return-value]
        weights = torch.ones(2) if sinks else None
        return module.attention(ours).paged(
            torch.zeros(1, 2, dim, dtype=dtype), rows, Attend(*pages, 1.0, sinks=weights)
        )

    yield of
    sys.modules.pop(NAME, None)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_within_the_limit_are_supported(taken: Any, dim: int, dtype: torch.dtype) -> None:
    assert taken(dim, dtype) == "theirs"


@pytest.mark.parametrize(
    "beyond",
    [
        {"dim": 63}, {"dim": 65}, {"dim": 192}, {"dim": 255}, {"dim": 512}, {"dtype": torch.float32},
        {"cache": torch.float8_e4m3fn}, {"cache": torch.float16}, {"exact": False}, {"sinks": True}, {"apart": True},
    ],
    ids=str,
)  # fmt: skip
def test_values_beyond_the_limit_use_other_kernels(taken: Any, beyond: dict[str, Any]) -> None:
    assert taken(**beyond) == "ours"
