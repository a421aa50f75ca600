"""The checks of `localllm selftest --backend npu`, for owners of an NPU: graphs, streams, weight formats."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch_npu

from ...kernels.ops import Ops
from ...kernels.ops.cases.moe import random_experts, random_weight
from ...kernels.ops.cases.reference_check import copy_to
from ...kernels.ops.moe import Routed
from ..pytorch.gpu.graph_check import GraphChecks, run
from ..pytorch.product_check import ProductResult
from ..pytorch.streams import SideStream
from .formats import WeightFormats
from .installation import start
from .products import DTYPE
from .recorder import NpuRecorder

GRAPHS = ("attention.paged-decode-wide", "attention.latent-apart-decode")
TOLERANCE = 2e-2  # of bfloat16, as in kernels/ops/cases
ROWS, WIDTH, EXPERTS = 32, 256, 4  # of the check of weight formats


def checks(ops: Ops, device: str, dtype: torch.dtype) -> Iterator[ProductResult]:
    """Graphs that are replayed with other lengths, the order of two streams, and weights in FRACTAL_NZ."""
    start()
    graphs = GraphChecks(ops, device, dtype, NpuRecorder, partial(SideStream, torch_npu.npu))
    yield from run([*graphs.tests(GRAPHS), ("weights in FRACTAL_NZ", partial(_formats, ops))])


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
