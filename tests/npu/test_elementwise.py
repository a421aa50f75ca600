"""Norms, activations, rotations, cache writes and attention on the NPU equal the references in all cases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localllm.backends.npu.attention import ATTENTION, OTHERS
from localllm.backends.npu.cache import WRITES
from localllm.backends.npu.elementwise import ACTIVATION, NORM, ROPE

from .op_cases import check_cases

pytestmark = pytest.mark.emulated


def test_norms() -> None:
    assert check_cases("norm", NORM) >= {"npu_rms_norm", "npu_gemma_rms_norm", "npu_add_rms_norm"}


def test_activations() -> None:
    assert check_cases("activation", ACTIVATION) >= {"npu_swiglu", "npu_geglu", "npu_fast_gelu"}


def test_rotations() -> None:
    assert check_cases("rope", ROPE) >= {"npu_rotary_mul", "npu_mrope"}


def test_cache_writes() -> None:
    assert check_cases("kv", WRITES) >= {"npu_scatter_pa_kv_cache"}


@pytest.mark.parametrize("name", ["", *OTHERS])
def test_attention(name: str) -> None:
    check_cases("attention", replace(ATTENTION, paged=OTHERS[name]) if name else ATTENTION)
