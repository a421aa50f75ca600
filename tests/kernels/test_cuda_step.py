"""All layers of a decode step in one kernel against the reference, on a CUDA device."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.kernels.ops import Ops
from localllm.kernels.ops.attention import Rows
from localllm.kernels.ops.cases import CASES
from localllm.kernels.ops.cases.case import Case
from localllm.kernels.ops.cases.layer import CACHE, inputs
from localllm.kernels.ops.cases.reference_check import call_op, copy_to, device_arguments, mismatch, reference_run
from localllm.kernels.ops.step import Cache, LayerStep

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

STACKS = [case for case in CASES if case.op == "layer.decoders"]
TOLERANCE = 4e-2  # as in the cases
SMALL: dict[str, Any] = {"heads": 8, "kv_heads": 2, "dim": 64, "hidden": 256, "inner": 192, "page_size": 16}
SHAPES: dict[str, dict[str, Any]] = {
    "small": SMALL,
    "qwen3-0.6b": {"heads": 16, "kv_heads": 8, "dim": 128, "hidden": 1024, "inner": 3072, "page_size": 16},
    "one-kv-head": {"heads": 8, "kv_heads": 1, "dim": 64, "hidden": 384, "inner": 1088, "page_size": 1},
    "odd": {"heads": 3, "kv_heads": 3, "dim": 128, "hidden": 640, "inner": 320, "page_size": 128, "bias": True},
}


@pytest.fixture(scope="module")
def ops() -> Iterator[Ops]:
    """Ops that use the step kernel for layers of any size, even where the loop over layers is faster."""
    step = pytest.importorskip("localllm.kernels.cuda.step.stack", exc_type=ImportError)
    if not step._hopper(torch.device("cuda")):
        pytest.skip("the kernel is for GPUs of capability 9 alone")
    from localllm.backends.cuda.ops import OPS

    assert OPS.layer.decoders is step.decoders
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "MAX_LAYER_BYTES", 1 << 30)
        yield OPS


def kernel_only(ops: Ops) -> Ops:
    """Ops that fail if a layer is computed separately."""

    def never(*_: Any) -> Any:
        raise AssertionError("left to the loop")

    return replace(ops, layer=replace(ops.layer, decoder=never))


def stack_case(context: int, layers: int = 2, **shape: Any) -> Case:
    make = inputs([(1, context)], layers=layers, **shape)
    return Case("layer.decoders", "random", make, mutates=CACHE, packs=("stack",))


def run(ops: Ops, case: Case, arguments: Mapping[str, Any]) -> list[Tensor]:
    """The outputs of the kernel; new memory is NaN."""
    there = device_arguments(case, ops, arguments, "cuda", torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        return call_op(case, ops.layer.decoders, {**there, "ops": kernel_only(ops)})
    finally:
        torch.use_deterministic_algorithms(False)


def right(case: Case, arguments: Mapping[str, Any]) -> list[Tensor]:
    """The outputs of the reference in float64."""
    wide = {name: copy_to(value, "cuda", wide=True) for name, value in arguments.items()}
    return [one.cpu() for one in call_op(case, Ops().layer.decoders, wide)]


@pytest.mark.parametrize("case", STACKS, ids=map(str, STACKS))
def test_cases(ops: Ops, case: Case) -> None:
    """All cases. Those that the kernel does not support run layer by layer."""
    arguments, expected = reference_run(case, Ops().layer.decoders, torch.bfloat16)
    there = device_arguments(case, ops, arguments, "cuda", torch.bfloat16)
    assert not mismatch(call_op(case, ops.layer.decoders, there), expected, TOLERANCE)


@pytest.mark.parametrize("context", [1, 17, 128, 129, 400, 3000])
@pytest.mark.parametrize("name", SHAPES)
def test_equals_reference(ops: Ops, name: str, context: int) -> None:
    case = stack_case(context, **SHAPES[name])
    arguments = dict(case.make(torch.Generator().manual_seed(context), torch.bfloat16))
    assert not mismatch(run(ops, case, arguments), right(case, arguments), TOLERANCE)


@pytest.mark.parametrize("seed", range(60))
def test_equals_reference_in_any_shape(ops: Ops, seed: int) -> None:
    pick = random.Random(seed)
    kv_heads, group = pick.choice([1, 2, 3, 8]), pick.choice([1, 2, 3, 4, 5, 8])
    case = stack_case(
        pick.choice([1, 2, 16, 100, 200, 513, 1100]),
        layers=pick.randint(1, 4),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=pick.choice([64, 128]),
        hidden=128 * pick.randint(1, 10),
        inner=64 * pick.randint(1, 40),
        bias=pick.random() < 0.3,
        head_norms=pick.random() < 0.5,
        offset=pick.choice([0.0, 1.0]),
        gate=pick.choice(["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"]),
        page_size=pick.choice([1, 16, 64, 128]),
    )
    arguments = dict(case.make(torch.Generator().manual_seed(seed), torch.bfloat16))
    assert not mismatch(run(ops, case, arguments), right(case, arguments), TOLERANCE)


@pytest.mark.parametrize("context", [5, 31, 130, 700])
def test_nothing_beyond_a_context_is_read(ops: Ops, context: int) -> None:
    case = stack_case(context, **SMALL)
    arguments = dict(case.make(torch.Generator().manual_seed(1), torch.bfloat16))
    expected = right(case, arguments)
    step: LayerStep = arguments["step"]
    used = torch.zeros(step.cache.keys.shape[1] * 16, dtype=torch.bool)
    places = torch.arange(context)
    used[step.rows.page_table[0, places // 16] * 16 + places % 16] = True
    unused = ~used.view(-1, 16)
    for pages in (step.cache.keys, step.cache.values):
        pages[:, unused] = float("nan")
    found = run(ops, case, arguments)
    assert not mismatch(found[2:], expected[2:], TOLERANCE)
    assert found[0][:, unused].isnan().all(), "nor written"


@pytest.mark.parametrize("name", ["small", "qwen3-0.6b"])
def test_a_captured_step_computes_any_context(ops: Ops, name: str) -> None:
    """1,000 replays equal the reference and have the same bits every time. Replays of padding change nothing."""
    shape, longest = SHAPES[name], 600
    case = stack_case(longest, **shape)
    arguments = dict(case.make(torch.Generator().manual_seed(2), torch.bfloat16))
    there = device_arguments(case, ops, arguments, "cuda", torch.bfloat16)
    plain = copy_to(arguments["stack"], "cuda")
    step: LayerStep = there["step"]
    held, cache = step.rows, step.cache
    pick, size = random.Random(3), shape["page_size"]
    table = held.page_table.clone()
    there |= {"ops": kernel_only(ops), "step": step._replace(rows=replace(held, exact=False))}
    ops.layer.decoders(**there)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ops.layer.decoders(**there)
    for turn in range(460 if name == "small" else 40):  # two replays each
        padding = turn % 7 == 3
        context = 1 if padding else pick.randint(1, longest)
        held.page_table.copy_(torch.zeros_like(table) if padding else table)
        at = int(held.page_table[0, (context - 1) // size]) * size + (context - 1) % size
        step.slots.fill_(at), held.context_lens.fill_(context), there["x"].normal_()
        keys, values = cache.keys.clone(), cache.values.clone()
        graph.replay()
        first = [one.clone() for one in (*found, cache.keys, cache.values)]
        cache.keys.copy_(keys), cache.values.copy_(values)
        graph.replay()
        again = [*found, cache.keys, cache.values]
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
        if padding:
            assert torch.equal(keys[:, 1:], cache.keys[:, 1:])
            assert torch.equal(values[:, 1:], cache.values[:, 1:])
        elif turn % 10 == 0:
            exact = Rows(held.row_starts, held.context_lens, held.page_table, held.query_lens, (context,))
            wide = {**there, "stack": plain, "step": step._replace(rows=exact, cache=Cache(keys, values))}
            wide = {name: copy_to(value, "cuda", wide=True) for name, value in wide.items() if name != "ops"}
            expected = Ops().layer.decoders(Ops(), **wide)
            assert not mismatch(first[:2], [one.cpu() for one in expected], TOLERANCE)


def test_a_step_with_an_empty_context_ends(ops: Ops) -> None:
    """The result is the same as with a context of one token, the new one."""
    case = stack_case(1, **SMALL)
    there = device_arguments(
        case, ops, case.make(torch.Generator().manual_seed(4), torch.bfloat16), "cuda", torch.bfloat16
    )
    there["ops"] = kernel_only(ops)
    expected = ops.layer.decoders(**there)
    there["step"].rows.context_lens.fill_(0)
    for found, other in zip(ops.layer.decoders(**there), expected, strict=True):
        assert torch.equal(found, other)


def test_unsupported_steps_run_layer_by_layer(ops: Ops) -> None:
    prompt = inputs([(5, 9)], layers=2, **SMALL)
    many = inputs([(1, 4)] * 2, layers=2, **SMALL)
    window = inputs([(1, 40)], layers=2, window=8, **SMALL)
    gemma = inputs([(1, 40)], layers=2, after_norms=True, **SMALL)
    for make in (prompt, many, window, gemma):
        case = Case("layer.decoders", "loop", make, packs=("stack",))
        there = device_arguments(
            case, ops, case.make(torch.Generator().manual_seed(1), torch.bfloat16), "cuda", torch.bfloat16
        )
        with pytest.raises(AssertionError, match="left to the loop"):
            ops.layer.decoders(**{**there, "ops": kernel_only(ops)})


def test_bad_arguments_are_refused_by_name(ops: Ops) -> None:
    case = stack_case(5, **SMALL)
    there = device_arguments(
        case, ops, case.make(torch.Generator().manual_seed(1), torch.bfloat16), "cuda", torch.bfloat16
    )
    with pytest.raises(RuntimeError, match=r"decoder_step: slots is int32, int64 expected"):
        ops.layer.decoders(**{**there, "step": there["step"]._replace(slots=there["step"].slots.int())})
    shifted = torch.zeros(2 * 2048, dtype=torch.bfloat16, device="cuda")[1 : 1 + there["x"].numel()].view_as(there["x"])
    with pytest.raises(RuntimeError, match=r"decoder_step: x is not aligned"):
        ops.layer.decoders(**{**there, "x": shifted})
    short = replace(there["stack"], shared_bytes=64, shared={})
    with pytest.raises(RuntimeError, match="decoder_step: shared has 64 bytes, too few"):
        ops.layer.decoders(**{**there, "stack": short})
