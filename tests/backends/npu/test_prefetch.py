"""Weight prefetch: its size limit, and its order beside the work of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from localllm.backends.npu.prefetch import with_prefetch, within
from localllm.kernels.ops import Ops
from localllm.kernels.ops.layer import Layer
from localllm.kernels.ops.mlp import GatedMlp
from localllm.kernels.ops.projection import Product

X = torch.zeros(1, 4)


class Notes:
    """Streams, a decoder and npu_prefetch that write down their calls."""

    after_router = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        monkeypatch.setattr(torch.ops.npu, "npu_prefetch", self.prefetch, raising=False)

    @contextmanager
    def fork(self) -> Iterator[None]:
        self.calls.append("fork")
        yield
        self.calls.append("end of fork")

    def join(self) -> None:
        self.calls.append("join")

    def prefetch(self, weight: Tensor, dependency: Tensor, max_size: int, offset: int) -> None:
        self.calls.append((tuple(weight.shape), max_size, offset))

    def decoder(self, ops: Ops, layer: Any, x: Tensor, stream: Tensor, step: Any) -> tuple[Tensor, Tensor]:
        self.calls.append("layer")
        return x, stream

    def run(self, layer: Any, limit: int = 10**6) -> list[Any]:
        ops = replace(Ops(), layer=Layer(decoder=self.decoder))
        with_prefetch(ops, self, limit).layer.decoder(ops, layer, X, X, cast(Any, None))
        return self.calls


def layer() -> Any:
    gate_up, down = (Product("dense", torch.zeros(shape)) for shape in ((16, 4), (4, 8)))
    return SimpleNamespace(mlp=GatedMlp(gate_up, down, "silu_and_mul"))


def test_layer_runs_beside_its_prefetch_and_then_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Notes(monkeypatch).run(layer())
    assert calls == ["fork", ((16, 4), 256, 0), ((4, 8), 128, 0), "end of fork", "layer", "join"]


def test_prefetch_has_a_limit_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Notes(monkeypatch).run(layer(), limit=300)[1:3] == [((16, 4), 256, 0), ((4, 8), 44, 0)]
    assert Notes(monkeypatch).run(layer(), limit=256)[1:3] == [((16, 4), 256, 0), "end of fork"]


def test_layers_of_experts_do_not_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Notes(monkeypatch).run(SimpleNamespace(mlp=None)) == ["layer"]


def test_no_weight_gets_an_empty_prefetch() -> None:
    """npu_prefetch refuses a size of 0."""
    weights = iter([torch.zeros(8), torch.zeros(8), torch.zeros(8)])
    assert [size for _, size in within(weights, 40)] == [32, 8]
