"""The checks of `localllm selftest --backend npu`, for owners of an NPU: what ops alone do not show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch_npu
from torch import Tensor

from ...kernels.ops import Ops
from ...kernels.ops.cases import CASES
from ...kernels.ops.cases.case import Case
from ...kernels.ops.cases.moe import random_experts, random_weight
from ...kernels.ops.cases.reference_check import copy_to, device_arguments, mismatch, reference_run
from ...kernels.ops.moe import Routed
from ..pytorch.device import NO_ROWS, Captured
from ..pytorch.product_check import ProductResult
from ..pytorch.streams import SideStream
from .formats import WeightFormats
from .installation import start
from .products import DTYPE
from .recorder import NpuRecorder

GRAPHS = [case for case in CASES if str(case) in ("attention.paged-decode-wide", "attention.latent-apart-decode")]
SHARES = (0.4, 1.0, 0.0)  # of the captured contexts; 0: contexts of one position
TOLERANCE = 2e-2  # of bfloat16, as in kernels/ops/cases
ROUNDS = 100
ROWS, WIDTH, EXPERTS = 32, 256, 4  # of the check of weight formats


def checks(ops: Ops, device: str, dtype: torch.dtype) -> Iterator[ProductResult]:
    """Graphs that are replayed with other lengths, the order of two streams, and weights in FRACTAL_NZ."""
    start()
    tests: list[tuple[str, Callable[[], str]]] = [
        *((f"graph of {case.op} with other contexts", partial(_graph, case, ops, dtype)) for case in GRAPHS),
        ("order of two streams", _streams),
        ("weights in FRACTAL_NZ", partial(_formats, ops)),
    ]
    for title, check in tests:
        try:
            with torch.inference_mode():
                defect = check()
        except Exception as error:  # drivers raise many kinds of errors
            defect = f"fails: {type(error).__name__}: {error}".partition("\n")[0]
        yield ProductResult(title, defect)


def _graph(case: Case, ops: Ops, dtype: torch.dtype) -> str:
    """The defect of a captured op that is replayed with other contexts than those of its capture."""
    reference = dict(Ops())[case.op]
    arguments, _ = reference_run(case, reference, dtype)
    on_device = device_arguments(case, ops, arguments, "npu", dtype)
    rows = replace(on_device["rows"], exact=False)
    output, replay = _captured(NpuRecorder(), lambda: dict(ops)[case.op](**{**on_device, "rows": rows}))
    for share in SHARES:
        contexts = tuple(max(1, int(share * context)) for context in rows.contexts)
        lens = torch.tensor(contexts, dtype=torch.int32)
        rows.context_lens.copy_(lens)
        replay(lens.numpy())
        changed = replace(arguments["rows"], context_lens=lens, contexts=contexts)
        wide = {name: copy_to(value, "cpu", wide=True) for name, value in (arguments | {"rows": changed}).items()}
        defect = mismatch([output], [reference(**wide)], case.tolerances[dtype])
        if defect:
            return f"with contexts {contexts} it {defect}"
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
