"""LoRA products: the grouped product of captured steps, and the reference of others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from localllm.backends.npu import lora
from localllm.backends.npu.device import device
from localllm.backends.pytorch.graphs.runner import GraphRunner
from localllm.backends.pytorch.opening import open_runner
from localllm.engine.files.model_files import read_model
from localllm.engine.options import Graphs
from localllm.kernels.ops import lora as reference
from localllm.kernels.ops.cases.lora import random_adapters, random_weights
from localllm.kernels.ops.cases.reference_check import copy_to
from localllm.kernels.ops.lora import LoraWeights
from localllm.kernels.ops.step import Adapters

from ..backends.adapters import OPTIONS, adapter_of, put, run, save_adapter
from ..backends.batches import Row
from ..backends.tiny import TINIES, VOCAB
from . import kernels
from .op_cases import OpsOfTorchNpu, check_cases

GROUPED = "npu::npu_grouped_matmul"
DEVICE = "npu"
BF16 = torch.bfloat16
ROWS = [(5, 2), (1, 1), (3, 0), (17, 4), (1, 2), (2, 0), (4, 3)]
RANKS = (0, 8, 16, 4, 16)


def weights(widths: tuple[int, ...], strided: bool = False) -> LoraWeights:
    plain = random_weights(RANKS, 64, widths, torch.Generator().manual_seed(3), BF16)
    if not strided:
        return copy_to(plain, DEVICE)
    return LoraWeights(*(apart(part.to(DEVICE)) for part in plain[:2]), plain.widths)


def apart(factor: Tensor) -> Tensor:
    """The factor with other values between its slots, as in the pool of a model's adapters."""
    slots, rows, columns = factor.shape
    pool = torch.full((slots, 2 * rows * columns), torch.nan, dtype=factor.dtype, device=factor.device)
    place = pool[:, 7 : 7 + rows * columns].unflatten(1, (rows, columns))
    place.copy_(factor)
    return place


def added(implementation, factors: LoraWeights, adapters: Adapters, dtype: torch.dtype = BF16) -> Tensor:
    x = torch.randn(len(adapters.slots), 64, generator=torch.Generator().manual_seed(1)).to(BF16)
    out = torch.ones(len(x), sum(factors.widths), dtype=dtype).to(factors.a.device)
    implementation(out, x.to(factors.a.device), factors, copy_to(adapters, str(factors.a.device)))
    return out.cpu()


@pytest.mark.emulated
def test_products_equal_references() -> None:
    check_cases("lora", lora.LORA)


@pytest.mark.contract
def test_grouped_products_fit_the_schema_and_the_meta_kernel() -> None:
    adapters = random_adapters(ROWS, torch.Generator().manual_seed(2), captured=True)
    factors = copy_to(random_weights(RANKS, 64, (64, 16, 16), torch.Generator(), BF16), "meta")
    x, out = (torch.empty(len(adapters.slots), width, dtype=BF16, device="meta") for width in (64, 96))
    with OpsOfTorchNpu() as called:
        lora.add(out, x, factors, copy_to(adapters, "meta"))
    assert called.names == {"npu_grouped_matmul"}


@pytest.mark.emulated
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "pool"])
@pytest.mark.parametrize("widths", [(48,), (64, 16, 16)], ids=["one", "qkv"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["layer", "head"])
def test_captured_step_uses_grouped_products(widths: tuple[int, ...], strided: bool, dtype: torch.dtype) -> None:
    adapters = random_adapters(ROWS, torch.Generator().manual_seed(2), captured=True)
    with OpsOfTorchNpu() as called:
        result = added(lora.add, weights(widths, strided), adapters, dtype)
    expected = added(reference.add, copy_to(weights(widths), "cpu"), adapters, dtype)
    assert called.names == {"npu_grouped_matmul"}
    torch.testing.assert_close(result, expected, rtol=0.02, atol=0.03)
    without = adapters.slots == 0
    assert (result[without] == 1.0).all()


@pytest.mark.emulated
def test_new_slots_of_a_captured_step_need_no_new_capture() -> None:
    """All numbers of the adapters are on the device, in the same tensors."""
    factors = weights((48,))
    adapters = copy_to(random_adapters(ROWS, torch.Generator().manual_seed(2), captured=True), DEVICE)
    other = copy_to(random_adapters(ROWS[::-1], torch.Generator().manual_seed(4), captured=True), DEVICE)
    adapters.slots.copy_(other.slots)
    adapters.scales.copy_(other.scales)
    assert torch.equal(added(lora.add, factors, adapters), added(lora.add, factors, other))


@pytest.mark.emulated
@pytest.mark.parametrize("rows", [ROWS, [(1, 1), (1, 2)]], ids=["not captured", "two adapters"])
def test_other_steps_are_those_of_the_reference(rows: list[tuple[int, int]]) -> None:
    adapters = random_adapters(rows, torch.Generator().manual_seed(2), captured=len(rows) == 2)
    with OpsOfTorchNpu() as called:
        result = added(lora.add, weights((48,)), adapters)
    assert not called.names
    torch.testing.assert_close(result, added(reference.add, copy_to(weights((48,)), "cpu"), adapters))


@pytest.mark.emulated
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # PEFT reads deprecated properties
@pytest.mark.parametrize("graphs", ["full", "breakable"])
def test_one_capture_serves_several_adapters_and_other_ones(graphs: Graphs, tmp_path: Path) -> None:
    """The rows of a replay have other adapters than those of the capture."""
    (tiny,) = (tiny for tiny in TINIES if tiny.label == "llama")
    tiny.save(tmp_path / "model")
    options = replace(OPTIONS, dtype="bfloat16", page_size=128, max_step_tokens=64, max_rows=6)
    files = read_model(tmp_path / "model")
    replayed, eager = (
        open_runner(files, each, device(each), 2**30)
        for each in (replace(options, graphs=graphs), replace(options, graphs="off"))
    )
    assert isinstance(replayed, GraphRunner)
    for slot in range(1, 5):
        config = LoraConfig(r=4 * slot, target_modules=["q_proj", "down_proj", "lm_head"])
        save_adapter(tiny.save(tmp_path / "copy"), config, tmp_path / f"adapter-{slot}", slot)
        for runner in (replayed, eager):
            put(runner, slot, adapter_of(tmp_path / f"adapter-{slot}"))
    prompts = np.random.default_rng(1).integers(3, VOCAB, (6, 6)).tolist()
    prefill = [Row(prompt, 0, [1 + row]) for row, prompt in enumerate(prompts)]
    decode = [Row([5 + row], 6, [1 + row]) for row in range(6)]
    captured = {"full": [decode], "breakable": [prefill, decode]}[graphs]
    base = run(eager, prefill, [0] * 6), run(eager, decode, [0] * 6)
    for slots in ([1, 0, 2, 1, 3, 0], [4, 3, 2, 1, 0, 4], [2] * 6):
        for rows, plain in zip((prefill, decode), base, strict=True):
            expected = run(eager, rows, slots)
            calls = kernels.calls[GROUPED]
            actual = run(replayed, rows, slots)
            is_capture = slots[0] == 1 and rows in captured
            assert (kernels.calls[GROUPED] > calls) == is_capture
            error, effect = ((actual - other).abs().mean(1) for other in (expected, plain))
            assert error.max() < 0.3, "the rounding of bfloat16"
            assert effect[np.array(slots) > 0].min() > 0.9
