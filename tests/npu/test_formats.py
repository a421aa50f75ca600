"""FRACTAL_NZ on NPU tensors, and the warnings about weights that stay ND."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_npu

from localllm.backends.npu.formats import NPUACLFormat, WeightFormats
from localllm.backends.npu.products import LINEAR
from localllm.kernels.ops.cases.moe import random_weight
from localllm.kernels.ops.linear import map_tensors, weight_tensors


@pytest.mark.contract
def test_formats_have_the_numbers_of_torch_npu() -> None:
    assert {name: int(torch_npu.Format[name]) for name in ("UNDEFINED", "ND", "FRACTAL_NZ")} == {
        one.name: one.value for one in NPUACLFormat
    }


@pytest.mark.emulated
class TestOnNpu:
    @staticmethod
    def packed(op: str, out_features: int, in_features: int) -> Any:
        weight = random_weight(op, out_features, in_features, torch.Generator().manual_seed(1), torch.bfloat16)
        return LINEAR.pack(map_tensors(weight, lambda tensor: tensor.to("npu")), torch.bfloat16)

    @pytest.mark.parametrize("op", ["dense", "int8"])
    def test_aligned_weight_becomes_nz_with_the_same_values(self, op: str) -> None:
        packed = self.packed(op, 96, 64)
        formats = WeightFormats()
        laid_out = formats.lay_out(op, packed)
        assert torch_npu.get_npu_format(laid_out.data) == NPUACLFormat.FRACTAL_NZ
        for tensor, other in zip(weight_tensors(laid_out), weight_tensors(packed), strict=True):
            assert torch.equal(tensor.cpu(), other.cpu())
        assert not formats.warnings()

    @pytest.mark.parametrize(
        ("op", "out_features", "warning"),
        [
            ("dense", 24, "2 weights are ND: 64 x 24 is not aligned (slower)"),
            ("int8", 48, "2 weights are ND: 64 x 48 is not aligned (slower)"),
            ("fp8", 64, "2 weights in fp8 are computed by references (slower)"),
            ("mxfp4", 64, "2 weights in mxfp4 are computed by references (slower)"),
        ],
    )
    def test_other_weights_stay_and_are_counted(self, op: str, out_features: int, warning: str) -> None:
        formats = WeightFormats()
        for _ in range(2):
            packed = self.packed(op, out_features, 64)
            assert formats.lay_out(op, packed) is packed
        assert formats.warnings() == (warning,)

    def test_int4_stays_nd_without_a_warning(self) -> None:
        formats = WeightFormats()
        packed = self.packed("int4", 64, 64)
        assert formats.lay_out("int4", packed) is packed
        assert not formats.warnings()

    def test_plain_turns_nz_off(self) -> None:
        formats = WeightFormats(plain=True)
        packed = self.packed("dense", 64, 64)
        assert formats.lay_out("dense", packed) is packed
        assert formats.warnings() == ("1 weights are ND: weight_layout is plain (slower)",)
