"""Products of packed weights, and the packing of every format that the NPU multiplies."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.backends.npu import products
from localllm.backends.npu.formats import WeightFormats
from localllm.backends.npu.products import LINEAR, Dense, Int4Columns, Int8Columns
from localllm.backends.pytorch.quant import int4, int8
from localllm.backends.pytorch.quant.awq import Awq
from localllm.backends.pytorch.quant.gptq import Gptq
from localllm.engine.files.quantization import Quantization
from localllm.kernels.ops.linear import Int4, Int8, Weight, map_tensors

from .op_cases import OpsOfTorchNpu, check_cases, check_contract

DEVICE = "npu"
BF16 = torch.bfloat16
GROUP = 32


def plain(out_features: int = 64, in_features: int = 96) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(out_features, in_features, generator=generator) / in_features**0.5


def on_device(weight: Weight) -> Any:
    return map_tensors(weight, lambda tensor: tensor.to(DEVICE))


def unpacked(weight: Any) -> Tensor:
    """The weight [out_features, in_features] in float64 that a product reads, from the layout of its columns."""
    on_cpu = map_tensors(weight, lambda tensor: tensor.cpu())
    match on_cpu:
        case Dense():
            return on_cpu.data.double().t()
        case Int8Columns():
            return (on_cpu.data.double() * on_cpu.scale).t()
    assert isinstance(on_cpu, Int4Columns)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    nibbles = (on_cpu.data.unsqueeze(-1) >> shifts & 15).flatten(-2).double()
    numbers = torch.where(nibbles > 7, nibbles - 16, nibbles)
    group = on_cpu.group or len(numbers)
    scale, offset = (part.double().repeat_interleave(group, 0)[: len(numbers)] for part in on_cpu[1:3])
    return ((numbers + offset) * scale).t()


def exact(weight: Weight) -> Tensor:
    """The weight in float64, with int4 scales rounded to bfloat16 as the NPU needs them."""
    match weight:
        case Int4():
            return weight._replace(scale=weight.scale.bfloat16().double()).dense()
        case Int8():
            return weight._replace(scale=weight.scale.double()).dense()
    assert isinstance(weight, Tensor)
    return weight.double()


def cut(weight: Any, sizes: Sequence[int]) -> list[Any]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        map_tensors(weight, lambda tensor, start=start, size=size: tensor[start : start + size])
        for start, size in zip(starts, sizes, strict=True)
    ]


FORMATS = {
    "dense": lambda: plain().bfloat16(),
    "int8": lambda: int8.quantise(plain()),
    "int4": lambda: int4.quantise(plain()),
    "int4-one-group": lambda: int4.quantise(plain(64, 48)),
}


@pytest.mark.emulated
@pytest.mark.parametrize("name", FORMATS)
def test_unpacking_returns_the_weight(name: str) -> None:
    weight = FORMATS[name]()
    packed = LINEAR.pack_slices(cut(on_device(weight), [32, 32]), 64, BF16)
    assert torch.equal(unpacked(packed), exact(weight))


@pytest.mark.emulated
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_many_outputs_are_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices cross the ends of blocks."""
    monkeypatch.setattr(products, "MAX_WIDTH", 40)
    weight = FORMATS[name]()
    packed = LINEAR.pack_slices(cut(on_device(weight), [24, 24, 16]), 64, BF16)
    assert packed.blocks == len(packed.data) == 2
    rows = torch.cat([unpacked(map_tensors(packed, itemgetter(block))) for block in range(2)])
    assert torch.equal(rows, exact(weight))
    assert WeightFormats().lay_out(name, packed) is packed
    monkeypatch.setattr(products, "MAX_WIDTH", 65535)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1)).to(DEVICE, BF16)
    bias = torch.randn(64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    expected = getattr(LINEAR, name)(x, LINEAR.pack(on_device(weight), BF16), bias)
    assert torch.equal(getattr(LINEAR, name)(x, packed, bias).cpu(), expected.cpu())


class OneWeight:
    """The tensors of one projection in a quantised file."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = {f"w.{name}": tensor for name, tensor in tensors.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def dtype(self, name: str) -> str:
        return ""

    def read(self, name: str, shape: Sequence[int], dtypes: Sequence[str]) -> Tensor:
        assert self.tensors[name].shape == tuple(shape)
        return self.tensors[name]


def words(nibbles: Tensor, order: Sequence[int]) -> Tensor:
    """nibbles [rows, columns] -> [rows, columns / 8] int32; the lowest four bits are column order[0]."""
    grouped = nibbles.unflatten(1, (-1, 8)).long()
    total = sum(grouped[..., column] << 4 * place for place, column in enumerate(order))
    return torch.where(total >= 2**31, total - 2**32, total).int()


@pytest.mark.emulated
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_stored_nibbles_are_repacked(method: str) -> None:
    """The weight that the NPU reads is (nibble - zero) * scale, from the order of nibbles in the file."""
    out_features, in_features = 64, 96
    generator = torch.Generator().manual_seed(7)
    nibbles = torch.randint(0, 16, (out_features, in_features), generator=generator)
    zeros = torch.randint(1, 16, (out_features, in_features // GROUP), generator=generator)
    scales = (torch.rand(in_features // GROUP, out_features, generator=generator) / 8).bfloat16().half()
    if method == "gptq":
        order = range(8)
        qweight = words(nibbles, order).t().contiguous()
        qzeros = words((zeros - 1).t(), order)
        scheme: Any = Gptq(Quantization("gptq", "int4", GROUP, symmetric=False, zeros_less_one=True))
    else:
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        qweight = words(nibbles.t(), order)
        qzeros = words(zeros.t(), order)
        scheme = Awq(Quantization("awq", "int4", GROUP, symmetric=False))
    loaded = scheme.load(OneWeight(qweight=qweight, qzeros=qzeros, scales=scales), "w", out_features, in_features)
    packed = LINEAR.pack(on_device(loaded.rows(0, out_features)), BF16)
    per_input = [part.repeat_interleave(GROUP, 1).double() for part in (zeros, scales.t())]
    expected = (nibbles - per_input[0]) * per_input[1]
    assert loaded.product == "int4_wide"
    assert torch.equal(unpacked(packed), expected)
    x = torch.randn(5, in_features, generator=generator).to(BF16)
    result = LINEAR.int4_wide(x.to(DEVICE), packed).cpu().double()
    torch.testing.assert_close(result, x.double() @ expected.t(), rtol=0.01, atol=0.01)


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_product_is_that_of_the_dequantised_weight(name: str, dtype: torch.dtype) -> None:
    """With a bias of any float dtype."""
    weight = FORMATS[name]()
    reference = exact(weight)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, reference.shape[1], generator=generator).to(BF16)
    bias = torch.randn(64, generator=generator).to(dtype)
    op = getattr(LINEAR, name.partition("-")[0])
    result = op(x.to(DEVICE), LINEAR.pack(on_device(weight), BF16), bias.to(DEVICE), torch.float32)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.cpu().double(), x.double() @ reference.t() + bias.double(), rtol=0.02, atol=0.04)


@pytest.mark.emulated
@pytest.mark.parametrize("outputs", [64, 65544], ids=["whole", "blocks"])
@pytest.mark.parametrize("op", ["dense", "int8", "int4", "int4_wide"])
def test_step_without_rows_has_an_empty_product(op: str, outputs: int) -> None:
    """A prompt chunk draws no token, and the quantised products refuse empty tensors."""
    quantise: Any = {"dense": Tensor.bfloat16, "int8": int8.quantise}.get(op, int4.quantise)
    packed = LINEAR.pack(on_device(quantise(plain(outputs, 32))), BF16)
    with OpsOfTorchNpu() as called:
        result = getattr(LINEAR, op)(torch.empty(0, 32, dtype=BF16, device=DEVICE), packed, None, torch.float32)
    assert (result.shape, result.dtype) == ((0, outputs), torch.float32)
    assert not called.names


@pytest.mark.emulated
def test_float16_weights_become_bfloat16() -> None:
    weight = plain().half()
    packed = LINEAR.pack(on_device(weight), BF16)
    assert packed.data.dtype == BF16
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1)).to(BF16)
    expected = x.double() @ weight.double().t()
    torch.testing.assert_close(LINEAR.dense(x.to(DEVICE), packed).cpu().double(), expected, rtol=0.02, atol=0.02)


@pytest.mark.contract
def test_calls_fit_the_schemas_and_meta_kernels() -> None:
    called = check_contract("linear", LINEAR)
    assert called == {"npu_dynamic_quant", "npu_quant_matmul", "npu_weight_quant_batchmatmul"}


@pytest.mark.emulated
def test_products_equal_references() -> None:
    check_cases("linear", LINEAR)


@pytest.mark.emulated
def test_int8_rounds_each_row_with_its_own_scale() -> None:
    weight = FORMATS["int8"]()
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1e-3], [1.0], [1e3], [0.0]])
    result = LINEAR.int8(x.to(DEVICE, BF16), LINEAR.pack(on_device(weight), BF16)).cpu().double()
    expected = x.double() @ exact(weight).t()
    assert ((result - expected).abs() <= 0.03 * expected.abs().amax(1, keepdim=True)).all()


@pytest.mark.emulated
@pytest.mark.parametrize("shape", [(64, 96), (65540, 32)], ids=["whole", "blocks"])
@pytest.mark.parametrize("bias", [False, True])
def test_static_scales_round_activations_with_their_offset(bias: bool, shape: tuple[int, int]) -> None:
    """1 / step is no bfloat16, and the products have no error of the scale from that."""
    generator = torch.Generator().manual_seed(1)
    outputs, inputs = shape
    x = torch.randn(4, inputs, generator=generator).to(BF16)
    data = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    scale, step, offset = torch.rand(outputs, generator=generator) / 64, 1 / 30.06, -9.0
    weight = Int8(data, scale, torch.tensor([step, offset]).expand(outputs, 2))
    shift = torch.randn(outputs, generator=generator) if bias else None
    with OpsOfTorchNpu() as called:
        result = LINEAR.int8(
            x.to(DEVICE), LINEAR.pack(on_device(weight), BF16), None if shift is None else shift.to(DEVICE)
        )
    assert called.names == {"npu_quantize", "npu_quant_matmul"}
    factor = torch.tensor(1 / step).to(BF16).double()
    rounded = ((x.double() * factor + offset).round().clamp(-128, 127) - offset) / factor
    expected = rounded @ (data.double() * scale.double()[:, None]).t() + (0.0 if shift is None else shift.double())
    actual = result.cpu().double()
    assert (actual - expected).abs().max() < 0.005 * expected.abs().max()
    assert (actual * expected).sum() / expected.square().sum() == pytest.approx(1.0, abs=3e-4)


@pytest.mark.contract
def test_calls_with_static_scales_fit_the_schemas() -> None:
    weight = Int8(torch.ones(64, 32, dtype=torch.int8), torch.ones(64), torch.tensor([0.1, 3.0]).expand(64, 2))
    packed = map_tensors(LINEAR.pack(weight, BF16), lambda tensor: tensor.to("meta"))
    assert LINEAR.int8(torch.ones(3, 32, dtype=BF16, device="meta"), packed).shape == (3, 64)


def test_sample_on_the_cpu_has_the_size_and_layout_of_the_weight() -> None:
    """A load estimates its memory with a sample on the CPU. Transposed values share no memory with an embedding."""
    weight = torch.linspace(-1.0, 1.0, 64 * 256).view(64, 256)
    packed = LINEAR.pack(weight, BF16)
    assert packed.data.shape == (256, 64)
    words = LINEAR.pack(int4.quantise(weight), BF16)
    assert words.data.shape == (256, 8)
    assert torch.equal(unpacked(words), exact(int4.quantise(weight)))
