"""The int4 product of oneDNN: its schema in torch, the packed weights, and every checkpoint of 4 bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from localllm.backends.pytorch.device import Device
from localllm.backends.pytorch.opening import open_runner
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions
from localllm.kernels.onednn import linear as products
from localllm.kernels.onednn.linear import OP, Int4Words
from localllm.kernels.ops import Ops
from localllm.kernels.ops.linear import Int4, linear_int4
from localllm.kernels.ops.register import REFERENCES

from ..batches import Row, make_batch
from ..checkpoints import CHECKPOINTS, Checkpoint
from ..tiny import VOCAB
from .stand_ins import XPU, int4_product

LINEAR = XPU.ops.linear
SIZES = {"hidden_size": 64, "intermediate_size": 96}  # multiples of the group
CHECKPOINTS_OF_4_BITS = [
    replace(checkpoint, sizes=SIZES)
    for checkpoint in CHECKPOINTS
    if checkpoint.model == "llama" and checkpoint.label.startswith(("gptq", "awq", "compressed-int4"))
]


def weight(out_features: int, in_features: int, group: int) -> Int4:
    generator = torch.Generator().manual_seed(out_features * in_features)
    groups = -(-in_features // group)
    data = torch.randint(0, 256, (out_features, in_features // 2), generator=generator, dtype=torch.uint8)
    scale = torch.rand(out_features, groups, generator=generator).half() * 0.1
    zero = torch.randint(0, 17, (out_features, groups), generator=generator, dtype=torch.uint8)
    return Int4(data, scale, zero, group, in_features)


def test_schema_of_the_op() -> None:
    schema = str(getattr(torch.ops.aten, OP).default._schema)
    arguments = "Tensor self, Tensor mat2, int qGroupSize, Tensor qScale, Tensor qZeros"
    assert schema == f"aten::{OP}({arguments}) -> Tensor"


def test_packed_weights_pass_the_meta_kernel_of_torch() -> None:
    packed = LINEAR.pack(weight(48, 96, 32), torch.bfloat16)
    on_meta = Int4Words(*(part.to("meta") if isinstance(part, torch.Tensor) else part for part in packed))
    x = torch.empty(5, 96, dtype=torch.bfloat16, device="meta")
    output = getattr(torch.ops.aten, OP)(x, on_meta.data, on_meta.group, on_meta.scale, on_meta.zero)
    assert (output.shape, output.dtype) == ((5, 48), torch.bfloat16)


def test_words_have_the_first_input_in_the_lowest_bits() -> None:
    packed = LINEAR.pack(weight(3, 32, 32)._replace(data=torch.full((3, 16), 0x10, dtype=torch.uint8)), torch.bfloat16)
    assert packed.data.tolist() == [[0x10101010] * 4] * 3


@pytest.mark.parametrize("rows", [0, 1, 7, 33])
@pytest.mark.parametrize(("out_features", "in_features", "group"), [(5, 64, 32), (48, 256, 128), (33, 96, 96)])
def test_product_equals_the_reference(out_features: int, in_features: int, group: int, rows: int) -> None:
    stored = weight(out_features, in_features, group)
    packed = LINEAR.pack(stored, torch.bfloat16)
    assert isinstance(packed, Int4Words)
    assert packed.out_features == out_features
    x = torch.randn(2, rows, in_features, generator=torch.Generator().manual_seed(rows)).bfloat16()
    bias = torch.randn(out_features, generator=torch.Generator().manual_seed(1))
    rounded = stored._replace(scale=stored.scale.bfloat16().double())
    for product in (LINEAR.int4, LINEAR.int4_wide):
        for shift, output_dtype in ((None, None), (bias, torch.float32)):
            actual = product(x, packed, shift, output_dtype)
            expected = linear_int4.int4_wide(x.double(), rounded, None if shift is None else shift.double())
            assert actual.dtype == (output_dtype or torch.bfloat16)
            torch.testing.assert_close(actual.double(), expected, rtol=1e-2, atol=2e-2)


def test_slices_are_packed_as_one_weight() -> None:
    stored = weight(64, 64, 32)
    slices = [
        Int4(stored.data[part], stored.scale[part], stored.zero[part], 32, 64) for part in (slice(0, 32), slice(32, 64))
    ]
    whole = LINEAR.pack(stored, torch.bfloat16)
    joined = LINEAR.pack_slices(slices, 64, torch.bfloat16)
    for one, other in zip(whole, joined, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.parametrize(
    ("in_features", "group", "dtype"), [(80, 32, torch.bfloat16), (64, 32, torch.float32), (64, 32, torch.float16)]
)
def test_other_weights_stay_with_the_reference(in_features: int, group: int, dtype: torch.dtype) -> None:
    """A last group that is shorter, and activations of float32: oneDNN has neither."""
    stored = weight(8, in_features, group)
    packed = LINEAR.pack(stored, dtype)
    assert isinstance(packed, Int4)
    x = torch.randn(3, in_features).to(dtype)
    assert torch.equal(LINEAR.int4(x, packed), linear_int4.int4(x, stored))
    assert torch.equal(LINEAR.int4_wide(x, packed), linear_int4.int4_wide(x, stored))


def test_a_torch_without_the_op_uses_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An XPU build of torch must have the kernel, another build only the schema."""
    assert products.is_present()
    monkeypatch.setattr(torch.xpu, "_is_compiled", lambda: True)
    assert not products.is_present(), "this torch has no kernel for XPU"
    monkeypatch.setattr(torch.xpu, "_is_compiled", lambda: False)
    monkeypatch.setattr(products, "OP", "_absent")
    assert not products.is_present()


@pytest.mark.parametrize("checkpoint", CHECKPOINTS_OF_4_BITS, ids=str)
def test_checkpoint_of_4_bits_is_computed_by_the_op(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWQ, GPTQ and compressed-tensors: the logits are as near to the float model as those of the references."""
    calls: list[int] = []
    monkeypatch.setattr(torch.ops.aten, OP, lambda *arguments: calls.append(1) or int4_product(*arguments))
    checkpoint.save(tmp_path / "small", tmp_path / "meant")
    errors = []
    for device in (XPU, replace(XPU, ops=Ops(), kernels=(REFERENCES,))):
        expected, actual = (logits(tmp_path / name, device) for name in ("meant", "small"))
        errors.append((actual - expected).abs().mean().item() / expected.abs().max().item())
    assert calls
    assert errors[0] <= 1.5 * errors[1] + 2e-3


def logits(folder: Path, device: Device) -> torch.Tensor:
    options = LoadOptions(cache_bytes=2**20, max_rows=4, threads=1, dtype="bfloat16")
    runner = open_runner(read_model(folder), options, device, 2**30)
    assert isinstance(runner, TorchRunner)
    ops = runner.device.ops
    with torch.inference_mode():
        step = runner.inputs.send(make_batch([Row([5, 9, 77, 3, 20, 101], 0, [1])], VOCAB)).step
        every = replace(step, last=torch.arange(6, dtype=torch.int32))
        return runner.model.logits(runner.model(every, ops, runner.kv), ops).float()
