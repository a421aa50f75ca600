"""Mixtures of experts: routing, and grouped products of every format."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from localllm.backends.npu import experts
from localllm.backends.npu.experts import MOE
from localllm.backends.npu.formats import WeightFormats
from localllm.backends.npu.products import Dense
from localllm.kernels.ops import moe as reference
from localllm.kernels.ops.cases.moe import random_experts
from localllm.kernels.ops.cases.reference_check import copy_to
from localllm.kernels.ops.moe import ExpertWeights, Routed, Routing

from .op_cases import OpsOfTorchNpu, check_cases, check_contract

DEVICE = "npu"
BF16 = torch.bfloat16


def packed(op: str, **more: Any) -> ExpertWeights:
    weights = random_experts(op, 4, 64, 64, torch.Generator().manual_seed(3), BF16, **more)
    return MOE.pack(copy_to(weights, DEVICE), BF16)


OPS = {
    "npu_moe_gating_top_k_softmax",
    "npu_moe_gating_top_k",
    "npu_moe_init_routing_v2",
    "npu_grouped_matmul",
    "npu_dequant_swiglu_quant",
    "npu_dynamic_quant",
    "npu_moe_finalize_routing",
}


@pytest.mark.contract
def test_calls_fit_the_schemas_and_meta_kernels() -> None:
    assert check_contract("moe", MOE) >= OPS


@pytest.mark.emulated
def test_experts_and_routes_equal_references() -> None:
    assert check_cases("moe", MOE) >= OPS


@pytest.mark.emulated
@pytest.mark.parametrize("op", ["dense", "int8", "int4"])
def test_each_token_gets_its_own_experts(op: str) -> None:
    """A permutation of the tokens permutes the results."""
    weights = packed(op)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, 64, generator=generator).to(DEVICE, BF16)
    chosen = torch.rand(9, 4, generator=generator).argsort(1)[:, :2].int().to(DEVICE)
    shares = torch.rand(9, 2, generator=generator).to(DEVICE)
    order = torch.randperm(9, generator=generator).to(DEVICE)
    result = experts.experts(x, Routed(chosen, shares), weights)
    permuted = experts.experts(x[order], Routed(chosen[order], shares[order]), weights)
    assert torch.equal(permuted.cpu(), result[order].cpu())
    swapped = experts.experts(x, Routed(chosen.flip(1).contiguous(), shares.flip(1).contiguous()), weights)
    torch.testing.assert_close(swapped.cpu(), result.cpu(), rtol=0.02, atol=1e-3)


@pytest.mark.emulated
@pytest.mark.parametrize("op", ["dense", "int8", "int4"])
@pytest.mark.parametrize("used", [[0], [3], [1, 2]], ids=["first", "last", "middle"])
def test_experts_may_have_no_tokens(used: list[int], op: str) -> None:
    weights = random_experts(op, 4, 64, 64, torch.Generator().manual_seed(3), BF16)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(BF16)
    routed = Routed(torch.tensor([used] * 5, dtype=torch.int32), torch.rand(5, len(used)))
    result = experts.experts(x.to(DEVICE), copy_to(routed, DEVICE), packed(op))
    wide = weights._replace(op="int4_wide") if op == "int4" else weights
    torch.testing.assert_close(result.cpu(), reference.experts(x, routed, wide), rtol=0.03, atol=0.03)


@pytest.mark.emulated
@pytest.mark.parametrize("op", ["dense", "int8", "int4"])
def test_step_without_tokens_calls_no_op(op: str) -> None:
    routed = Routed(torch.empty(0, 2, dtype=torch.int32, device=DEVICE), torch.empty(0, 2, device=DEVICE))
    weights = packed(op)
    with OpsOfTorchNpu() as called:
        result = experts.experts(torch.empty(0, 64, dtype=BF16, device=DEVICE), routed, weights)
        chosen = experts.route(torch.empty(0, 4, device=DEVICE), Routing(2, "softmax", True))
    assert result.shape == (0, 64)
    assert chosen.experts.shape == (0, 2)
    assert not called.names


@pytest.mark.emulated
def test_float16_weights_become_bfloat16() -> None:
    weights = random_experts("dense", 4, 64, 64, torch.Generator().manual_seed(3), torch.float16)
    on_device = MOE.pack(copy_to(weights, DEVICE), BF16)
    assert on_device.gate_up.data.dtype == on_device.down.data.dtype == BF16
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(BF16)
    routed = Routed(torch.arange(10).view(5, 2).remainder(4).int(), torch.rand(5, 2))
    result = experts.experts(x.to(DEVICE), copy_to(routed, DEVICE), on_device)
    expected = reference.experts(x.float(), routed, copy_to(weights, "cpu", wide=True))
    torch.testing.assert_close(result.cpu().float(), expected.float(), rtol=0.03, atol=0.03)


@pytest.mark.emulated
def test_one_expert_has_a_sum_instead_of_a_count() -> None:
    """npu_grouped_matmul refuses a list of one count."""
    weights = random_experts("dense", 1, 64, 64, torch.Generator().manual_seed(3), BF16)
    on_device = MOE.pack(copy_to(weights, DEVICE), BF16)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(BF16)
    routed = Routed(torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1))
    result = experts.experts(x.to(DEVICE), copy_to(routed, DEVICE), on_device)
    expected = reference.experts(x, routed, weights)
    torch.testing.assert_close(result.cpu(), expected, rtol=0.02, atol=0.02)


@pytest.mark.emulated
@pytest.mark.parametrize(("group", "inputs"), [(32, 32), (48, 16), (64, 0), (96, 0)])
def test_int4_has_groups_of_one_size(group: int, inputs: int) -> None:
    """npu_grouped_matmul needs groups that divide the inputs, here 64."""
    weights = random_experts("int4", 4, 64, 64, torch.Generator().manual_seed(3), BF16, group=group)
    on_device = MOE.pack(copy_to(weights, DEVICE), BF16)
    assert on_device.gate_up.group == on_device.down.group == inputs
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).to(BF16)
    routed = Routed(torch.arange(18).view(9, 2).remainder(4).int(), torch.rand(9, 2))
    result = experts.experts(x.to(DEVICE), copy_to(routed, DEVICE), on_device)
    expected = reference.experts(x, routed, weights._replace(op="int4_wide"))
    torch.testing.assert_close(result.cpu(), expected, rtol=0.03, atol=0.03)


@pytest.mark.emulated
def test_int4_of_odd_outputs_becomes_floats() -> None:
    weights = random_experts("int4", 3, 37, 29, torch.Generator().manual_seed(3), BF16)
    on_device = MOE.pack(copy_to(weights, DEVICE), BF16)
    assert isinstance(on_device.down, Dense)
    formats = WeightFormats(plain=True)
    formats.lay_out("int4", on_device.down)
    assert any("experts are floats" in warning for warning in formats.warnings())


@pytest.mark.emulated
def test_unsupported_groups_of_experts_are_routed_by_the_reference() -> None:
    """npu_moe_gating_top_k needs at least three experts in a group."""
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(2))
    routing = Routing(2, "sigmoid", True, groups=4, top_groups=2)
    with OpsOfTorchNpu() as called:
        routed = experts.route(logits.to(DEVICE), routing)
    assert not called.names
    assert torch.equal(routed.experts.cpu(), reference.route(logits, routing).experts)
