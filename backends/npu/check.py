"""The checks of `localllm selftest --backend npu`, for owners of an NPU: what ops alone do not show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch_npu
from torch import Tensor

from ...kernels.ops import Ops
from ...kernels.ops.attention import Attend, Rows, paged_attention
from ...kernels.ops.cases.moe import random_experts, random_weight
from ...kernels.ops.cases.reference_check import copy_to
from ...kernels.ops.moe import Routed
from ..pytorch.device import NO_ROWS, Captured
from ..pytorch.product_check import ProductResult
from ..pytorch.streams import SideStream
from .defaults import PAGE_SIZE
from .formats import WeightFormats
from .installation import start
from .memory import read_bandwidth
from .products import DTYPE
from .recorder import NpuRecorder

HEADS, KV_HEADS, DIM, PAGES = 8, 2, 128, 3
TOLERANCE = 2e-2  # of bfloat16, as in kernels/ops/cases
REPLAYS = ((1, 300), (129, 7), (384, 128))  # contexts of two rows
ROUNDS = 100
ROWS, WIDTH, EXPERTS = 32, 256, 4  # of the check of weight formats


def checks(ops: Ops, device: str, dtype: torch.dtype) -> Iterator[ProductResult]:
    """Replays with other lengths, the order of two streams, weights in FRACTAL_NZ, and the speed of the memory."""
    start()
    for title, check in (
        ("graph with other context lengths at each replay", partial(_graph, ops, dtype)),
        ("order of two streams", _streams),
        ("weights in FRACTAL_NZ", partial(_formats, ops)),
    ):
        try:
            yield ProductResult(title, check(), {})
        except Exception as error:  # drivers raise many kinds of errors
            yield ProductResult(title, f"fails: {type(error).__name__}: {error}", {})
    yield _bandwidth()


def _graph(ops: Ops, dtype: torch.dtype) -> str:
    """The defect of captured attention that is replayed with the contexts REPLAYS."""
    generator = torch.Generator().manual_seed(1)
    pages = torch.randn(2, 2 * PAGES + 1, PAGE_SIZE, KV_HEADS, DIM, generator=generator).to("npu", dtype)
    query = torch.randn(2, HEADS, DIM, generator=generator).to("npu", dtype)
    table = torch.arange(1, 2 * PAGES + 1, dtype=torch.int32).view(2, PAGES).to("npu")
    lens = torch.full((2,), PAGES * PAGE_SIZE, dtype=torch.int32, device="npu")
    attend = Attend(pages[0], pages[1], DIM**-0.5)
    starts = torch.arange(3, dtype=torch.int32, device="npu")
    rows = Rows(starts, lens, table, (1, 1), (PAGES * PAGE_SIZE,) * 2, exact=False)
    output, replay = _captured(NpuRecorder(), lambda: ops.attention.paged(query, rows, attend))
    for contexts in REPLAYS:
        lens.copy_(torch.tensor(contexts, dtype=torch.int32))
        replay(lens.cpu().numpy())
        on_host = Rows(starts.cpu(), lens.cpu(), table.cpu(), (1, 1), contexts)
        pages_on_host = Attend(pages[0].cpu().float(), pages[1].cpu().float(), attend.scale)
        expected = paged_attention(query.cpu().float(), on_host, pages_on_host)
        error = (output.cpu().float() - expected).abs().max().item()
        if not error <= TOLERANCE * expected.abs().max().item():
            return f"contexts {contexts}: the error is {error:.3g}"
    return ""


def _captured(recorder: NpuRecorder, work: Callable[[], Tensor]) -> tuple[Tensor, Captured]:
    with recorder.session():
        work()
        recorder.begin()
        output = work()
        return output, recorder.end()


def _streams() -> str:
    """The defect of work on a second stream between a fork and a join, in a captured graph."""
    streams = SideStream(torch_npu.npu)
    x = torch.ones(1024, 1024, device="npu")

    def work() -> Tensor:
        y = x + 1.0
        with streams.fork():
            side = y * 2.0
        main = y * 3.0
        streams.join()
        return side + main

    output, replay = _captured(NpuRecorder(), work)
    for number in range(ROUNDS):
        x.fill_(float(number))
        replay(NO_ROWS)
        if not (output == 5.0 * (number + 1)).all().item():
            return f"a wrong sum in round {number}"
    return ""


def _formats(ops: Ops) -> str:
    """The defect of products whose weights are FRACTAL_NZ, compared with the same weights in ND."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator).to("npu", DTYPE)
    choices = torch.arange(2 * ROWS).view(ROWS, 2).remainder(EXPERTS).int()
    routed = Routed(choices.to("npu"), torch.ones(ROWS, 2, device="npu"))
    for op in ("dense", "int8"):
        lay_out = partial(WeightFormats().lay_out, op)
        weight = ops.linear.pack(copy_to(random_weight(op, WIDTH, WIDTH, generator, DTYPE), "npu"), DTYPE)
        experts = ops.moe.pack(copy_to(random_experts(op, EXPERTS, WIDTH, WIDTH, generator, DTYPE), "npu"), DTYPE)
        nz = experts._replace(gate_up=lay_out(experts.gate_up), down=lay_out(experts.down))
        product = getattr(ops.linear, op)
        results = product(x, lay_out(weight)), ops.moe.experts(x, routed, nz)
        expected = product(x, weight), ops.moe.experts(x, routed, experts)
        for title, one, other in zip(("the product", "the experts"), results, expected, strict=True):
            error = (one - other).abs().max().item()
            if not error <= TOLERANCE * other.abs().max().item():
                return f"{title} of {op} weights: the error is {error:.3g}"
    return ""


def _bandwidth() -> ProductResult:
    rate = read_bandwidth()
    title = (
        "read bandwidth not measured: too little free memory"
        if rate is None
        else f"read bandwidth {rate / 1e9:.0f} GB/s"
    )
    return ProductResult(title, "", {})
