"""The LoRA products of CUDA C++ against the reference, on a CUDA device."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases import CASES
from localllm.kernels.ops.cases.case import Case
from localllm.kernels.ops.cases.lora import random_adapters, random_weights
from localllm.kernels.ops.cases.reference_check import call_op, copy_to, device_arguments
from localllm.kernels.ops.linear import Linear
from localllm.kernels.ops.lora import Lora, LoraWeights
from localllm.kernels.ops.projection import Product
from localllm.kernels.ops.step import Adapters

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
RUNS = [(case, dtype) for case in CASES if case.op.startswith("lora.") for dtype in case.tolerances]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(scope="module")
def ops() -> Ops:
    importlib.import_module("localllm.kernels.cuda")
    from localllm.kernels.cuda.lora import products as lora
    from localllm.kernels.cuda.products import linear

    return Ops(
        lora=Lora(add=lora.add, embedding=lora.embedding, project=lora.project),
        linear=Linear(dense=linear.dense, int8=linear.int8, pack_slices=linear.pack_slices),
    )


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """torch.empty returns NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    limit = TOLERANCES[dtype] * expected.abs().max().item()
    torch.testing.assert_close(actual.cpu().double(), expected.cpu().double(), rtol=0.0, atol=limit)


@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=[f"{case}-{dtype}" for case, dtype in RUNS])
def test_product_equals_reference(ops: Ops, case: Case, dtype: torch.dtype) -> None:
    arguments = dict(case.make(torch.Generator().manual_seed(7), dtype))
    wide = {name: copy_to(value, "cpu", wide=True) for name, value in arguments.items()}
    expected = call_op(case, dict(Ops())[case.op], wide)[0]
    actual = call_op(case, dict(ops)[case.op], device_arguments(case, ops, arguments, "cuda", dtype))[0]
    assert_close(actual, expected, dtype)


class Inputs:
    """Random arguments on the GPU: a row of one token for each slot of `slots`."""

    def __init__(
        self, slots: list[int], rank: int, in_features: int, widths: tuple[int, ...], dtype: torch.dtype, frame: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(len(slots))
        ranks = (0, *(max(1, rank // (1 + slot % 3)) for slot in range(max(slots) - 1)), rank)
        weights = random_weights(ranks, in_features, widths, generator, dtype)
        self.weights: LoraWeights = copy_to(weights, "cuda")
        self.adapters: Adapters = copy_to(in_frame(random_adapters([(1, s) for s in slots], generator), frame), "cuda")
        self.x = torch.randn(len(slots), in_features, generator=generator).to("cuda", dtype)
        self.weight = (torch.randn(sum(widths), in_features, generator=generator) / in_features**0.5).to("cuda", dtype)
        torch.cuda.synchronize()  # the kernels read factors and tiles before they wait

    def added(self, start: Tensor) -> Tensor:
        """`start` plus the LoRA product, in float64."""
        expected = start.double()
        adapters = self.adapters._replace(tiles=None)
        Ops().lora.add(expected, *copy_to((self.x, self.weights, adapters), "cuda", wide=True))
        return expected


def in_frame(adapters: Adapters, frame: int) -> Adapters:
    """The adapters as in a capture with `frame` tiles: unused tiles are empty."""
    assert adapters.tiles is not None
    _, starts, slots, _ = adapters.tiles
    unused = max(0, frame - len(slots))
    starts = torch.cat([starts, starts[-1:].expand(unused)])
    slots = torch.cat([slots, slots.new_zeros(unused)])
    used = tuple(range(1, int(adapters.slots.max()) + 1))
    return adapters._replace(used=used, segments=None, tiles=adapters.tiles._replace(starts=starts, slots=slots))


SLOTS = {
    "one-row": [1],
    "one-adapter": [1] * 64,
    "mixed": [0, 1, 2, 0, 3, 3, 1, 2] * 5,
    "each-its-own": list(range(1, 41)),
    "several-tiles": [1] * 37 + [2] * 17 + [0] * 3 + [3],
}


@pytest.mark.parametrize("label", SLOTS)
@pytest.mark.parametrize("rank", [4, 8, 16, 64, 80, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_adds_to_wide_projections(ops: Ops, label: str, rank: int, dtype: torch.dtype) -> None:
    """The sizes need several blocks, shares of inputs and tiles. Unused tiles are empty."""
    inputs = Inputs(SLOTS[label], rank, 1536, (512, 260, 64), dtype, frame=64)
    for out_dtype in (dtype, torch.float32):
        start = torch.randn(len(inputs.x), 836, device="cuda").to(out_dtype)
        out = start.clone()
        ops.lora.add(out, inputs.x, inputs.weights, inputs.adapters)
        assert_close(out, inputs.added(start), dtype)


@pytest.mark.parametrize("label", SLOTS)
@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 17, 64])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_projection_with_every_number_of_rows(
    ops: Ops, label: str, rank: int, rows: int, out_dtype: torch.dtype
) -> None:
    slots = (SLOTS[label] * 64)[:rows]
    slots[0] = 1
    inputs = Inputs(slots, rank, 2048, (512, 128, 128), torch.bfloat16, frame=rows)
    base = Product("dense", ops.linear.pack(inputs.weight, torch.bfloat16))
    actual = ops.lora.project(base, inputs.x, ops, inputs.weights, inputs.adapters, out_dtype)
    assert actual.dtype == out_dtype
    assert_close(actual, inputs.added(inputs.x.double() @ inputs.weight.double().T), torch.bfloat16)


def test_rows_do_not_depend_on_each_other(ops: Ops) -> None:
    """A row alone in its tile has the same bits as among others."""
    inputs = Inputs([1, 2, 1, 1, 0, 2], 16, 1024, (256,), torch.bfloat16)
    together = torch.zeros(6, 256, device="cuda", dtype=torch.bfloat16)
    ops.lora.add(together, inputs.x, inputs.weights, inputs.adapters)
    generator = torch.Generator().manual_seed(0)
    for row, slot in enumerate([1, 2, 1, 1]):
        adapters = copy_to(random_adapters([(1, slot)], generator), "cuda")
        adapters = adapters._replace(scales=inputs.adapters.scales[row : row + 1].clone())
        torch.cuda.synchronize()
        alone = torch.zeros(1, 256, device="cuda", dtype=torch.bfloat16)
        ops.lora.add(alone, inputs.x[row : row + 1], inputs.weights, adapters)
        assert torch.equal(alone[0], together[row])


def test_steps_in_a_row_do_not_race(ops: Ops) -> None:
    """Each kernel starts before the kernel ahead ends. A graph of 40 projections that read each other's outputs equals
    the same projections with a synchronisation after each."""
    chain = [Inputs([1, 2, 3, 0] * 8, 16, 512, (512,), torch.bfloat16) for _ in range(4)]
    bases = [Product("dense", ops.linear.pack(one.weight, torch.bfloat16)) for one in chain]
    torch.cuda.synchronize()

    def run(x: Tensor, wait: Callable[[], None]) -> Tensor:
        for step in range(40):
            one = chain[step % 4]
            x = ops.lora.project(bases[step % 4], x, ops, one.weights, one.adapters)
            wait()
            x = x / x.float().norm(dim=1, keepdim=True).to(x.dtype) * 16
        return x

    expected = run(chain[0].x, torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = run(chain[0].x, lambda: None)
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(actual, expected)


def kernels_of(call: Callable[[], object]) -> Counter[str]:
    """The number of launches of each kernel in a call."""
    torch.use_deterministic_algorithms(False)  # otherwise torch.empty starts a kernel
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    return Counter({event.key: event.count for event in profile.key_averages() if event.device_type.name == "CUDA"})


@pytest.mark.parametrize("slots", [[1], [1] * 8, list(range(1, 9)), [0, 1, 2, 3] * 16], ids=str)
def test_each_product_has_two_launches(ops: Ops, slots: list[int]) -> None:
    """The number is the same for one adapter or several, and for all slices of a projection together."""
    inputs = Inputs(slots, 16, 1024, (256, 64, 64), torch.bfloat16)
    out = torch.zeros(len(slots), 384, device="cuda", dtype=torch.bfloat16)
    launches = kernels_of(partial(ops.lora.add, out, inputs.x, inputs.weights, inputs.adapters))
    assert [launch for launch in launches if "shrink_tiles" not in launch and "expand_tiles" not in launch] == []
    assert sorted(launches.values()) == [1, 1]


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, ["shrink_tiles", "small_batch"]), (64, ["shrink_tiles", "expand_tiles"])]
)
def test_a_projection_adds_one_or_two_launches(ops: Ops, rows: int, expected: list[str]) -> None:
    """The product of a small batch adds the LoRA product itself."""
    inputs = Inputs([1] * rows, 16, 2048, (512, 128, 128), torch.bfloat16)
    base = Product("dense", ops.linear.pack(inputs.weight, torch.bfloat16))
    alone = kernels_of(partial(base, inputs.x, ops))
    launches = kernels_of(partial(ops.lora.project, base, inputs.x, ops, inputs.weights, inputs.adapters))
    assert launches.total() - alone.total() == (1 if rows == 1 else 2)
    for name in expected:
        assert sum(count for launch, count in launches.items() if name in launch) == 1


def refused() -> list[tuple[dict[str, Any], str]]:
    """(changed arguments, text of the error)."""
    return [
        ({"x": torch.zeros(2, 63, device="cuda")}, "lora_shrink: x has shape [2, 63], [2, 64] expected"),
        ({"x": torch.zeros(2, 64, device="cuda").half()}, "lora_shrink: x and lora_a are of different types"),
        ({"x": torch.zeros(2, 64)}, "lora_shrink: x is not on a CUDA device"),
        ({"slots": torch.zeros(3, device="cuda").int()}, "lora_shrink: slots has shape [3], [2] expected"),
        ({"order": torch.zeros(2, device="cuda")}, "lora_shrink: order is float32, int32 expected"),
        ({"widths": (16,)}, "lora_shrink: lora_b has shape [3, 48, 16], [any, 16, any] expected"),
        ({"chunk": 0}, "lora_shrink: chunk is 0, 1 to 2147483647 expected"),
    ]


def test_bad_arguments_are_refused_by_name(ops: Ops) -> None:
    inputs = Inputs([1, 2], 16, 64, (48,), torch.float32)
    adapters = inputs.adapters
    assert adapters.tiles is not None
    order, starts, tile_slots, chunk = adapters.tiles
    good = {
        "inner": torch.zeros(1, 2, 16, device="cuda"), "x": inputs.x, "lora_a": inputs.weights.a,
        "lora_b": inputs.weights.b, "widths": (48,), "slots": adapters.slots, "scales": adapters.scales,
        "order": order, "starts": starts, "tile_slots": tile_slots, "chunk": chunk,
    }  # fmt: skip
    torch.ops.localllm.lora_shrink(**good)
    for changed, text in refused():
        with pytest.raises(RuntimeError, match=re.escape(text)):
            torch.ops.localllm.lora_shrink(**{**good, **changed})
