"""The ops of the NPU that replace norms, activations, rotations, cache writes and attention, on the fake NPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.backends import npu
from localllm.backends.npu import attention, elementwise
from localllm.backends.npu.driver import first
from localllm.backends.npu.installation import start
from localllm.backends.npu.ops import OPS
from localllm.engine.runner import Unavailable
from localllm.kernels.ops.attention import paged_attention
from localllm.kernels.ops.cases.attention import _inputs as inputs
from localllm.kernels.ops.cases.attention import _with_sinks as with_sinks
from localllm.kernels.ops.cases.reference_check import copy_to

from .op_cases import OpsOfTorchNpu, check_cases

pytestmark = pytest.mark.emulated

CALLED = {
    "norm": {"npu_rms_norm", "npu_gemma_rms_norm", "npu_add_rms_norm"},
    "activation": {"npu_swiglu", "npu_geglu", "npu_fast_gelu"},
    "rope": {"npu_rotary_mul"},
    "kv": {"npu_scatter_pa_kv_cache"},
    "attention": {"npu_fused_infer_attention_score_v2"},
}
# Sizes and rows (queries, context) that the kernels of attention support.
REAL = {"heads": 8, "kv_heads": 2, "dim": 128, "page_size": 128}
ROWS = {
    "decode": [(1, 9), (1, 300), (1, 128), (1, 1)],
    "prefill": [(140, 140)],
    "chunk": [(5, 300), (5, 129)],
    "mixed": [(1, 9), (1, 257), (40, 40), (17, 300), (3, 12)],
    "long": [(260, 2400)],
}
KINDS: dict[str, Callable[..., Any]] = {
    "plain": inputs,
    "window": lambda rows, **sizes: inputs(rows, window=50, **sizes),
    "sinks": with_sinks,
    "sinks-window": lambda rows, **sizes: with_sinks(rows, window=50, **sizes),
}


@pytest.mark.parametrize("family", CALLED)
def test_cases_equal_the_references(family: str) -> None:
    assert check_cases(family, getattr(OPS, family)) >= CALLED[family]


@pytest.mark.parametrize(
    "attend", [attention.by_length, *attention.OTHERS.values()], ids=["by_length", *attention.OTHERS]
)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_over_large_pages(kind: str, rows: str, attend: Callable[..., Tensor]) -> None:
    arguments = KINDS[kind](ROWS[rows], **REAL)(torch.Generator().manual_seed(5), torch.bfloat16)
    expected = paged_attention(**{name: copy_to(value, "cpu", wide=True) for name, value in arguments.items()})
    out = torch.full(arguments["query"].shape, float("nan"), dtype=torch.bfloat16, device="npu")
    on_device = {name: copy_to(value, "npu") for name, value in arguments.items()}
    with OpsOfTorchNpu() as called, torch.inference_mode():
        result = attend(**on_device)
        attend(**on_device, out=out)
    assert called.names or attend is attention.by_pages
    for output in (result, out):
        assert (output.cpu() - expected).abs().max() <= 2e-2 * expected.abs().max()


@pytest.mark.parametrize(
    ("name", "value"), [("soft_cap", 2.0), ("page_size", 16), ("dim", 24), ("dtype", torch.float32)]
)
def test_attention_that_the_kernels_lack_is_computed_by_the_reference(name: str, value: Any) -> None:
    dtype = value if name == "dtype" else torch.bfloat16
    sizes = REAL if name == "dtype" else REAL | {name: value}
    arguments = inputs([(1, 9), (20, 40)], **sizes)(torch.Generator().manual_seed(5), dtype)
    with OpsOfTorchNpu() as called, torch.inference_mode():
        result = attention.by_length(**{each: copy_to(argument, "npu") for each, argument in arguments.items()})
    assert not called.names
    assert (result.cpu().float() - paged_attention(**arguments).float()).abs().max() < 2e-2


def test_the_fake_is_no_hardware() -> None:
    """CANN's library says what the chip is. doctor, bench and selftest ask the probe."""
    ctypes.CDLL("libascendcl.so")
    chip = first()
    assert not chip.name.startswith("Ascend")
    assert isinstance(npu.probe(), Unavailable)


def test_the_start_changes_nothing_of_cuda() -> None:
    before = torch.cuda.is_available, torch.cuda.synchronize
    start()
    start()
    assert (torch.cuda.is_available, torch.cuda.synchronize) == before
    assert start.cache_info().currsize == 1


def test_a_norm_with_another_offset_is_computed_by_the_reference() -> None:
    x, weight = torch.randn(3, 64, device="npu"), torch.randn(64, device="npu")
    with OpsOfTorchNpu() as called, torch.inference_mode():
        elementwise.rms_norm(x, weight, 1e-6, 0.5)
    assert not called.names
