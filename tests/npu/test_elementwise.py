"""Norms, activations, rotations and cache writes on the NPU equal the references in all cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from localllm.backends.npu.cache import WRITES
from localllm.backends.npu.elementwise import ACTIVATION, NORM, ROPE, interleaved_rope, rope
from localllm.kernels.ops import rope as ropes

from . import kernels
from .op_cases import check_cases

pytestmark = pytest.mark.emulated
Rotate = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """As in the product. Otherwise torch_npu's formulas of derivatives call other ops."""
    with torch.inference_mode():
        yield


def test_norms() -> None:
    assert check_cases("norm", NORM) >= {"npu_rms_norm", "npu_gemma_rms_norm", "npu_add_rms_norm"}


def test_activations() -> None:
    assert check_cases("activation", ACTIVATION) >= {"npu_swiglu", "npu_geglu", "npu_fast_gelu"}


def test_rotations() -> None:
    assert check_cases("rope", ROPE) >= {"npu_rotary_mul"}


@pytest.mark.parametrize(("rotate", "reference"), [(rope, ropes.rope), (interleaved_rope, ropes.interleaved_rope)])
def test_a_rotation_of_some_dimensions(rotate: Rotate, reference: Rotate) -> None:
    query, key, cos, sin = (torch.randn(shape) for shape in ((5, 4, 64), (5, 2, 64), (5, 16), (5, 16)))
    rotated = rotate(*(x.to("npu") for x in (query, key, cos, sin)))
    for actual, expected in zip(rotated, reference(query, key, cos, sin), strict=True):
        torch.testing.assert_close(actual.cpu(), expected)
    assert kernels.calls["npu::npu_mrope"]


def test_cache_writes() -> None:
    assert check_cases("kv", WRITES) >= {"npu_scatter_pa_kv_cache"}
