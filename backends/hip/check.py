"""The checks of `localllm selftest --backend hip`, for owners of an AMD GPU: what ops alone do not show."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from ...kernels.ops import Ops
from ..pytorch.gpu.graph_check import GraphChecks, run
from ..pytorch.graphs.cuda import CudaRecorder
from ..pytorch.product_check import ProductResult
from ..pytorch.streams import SideStream

GRAPHS = ("attention.paged-decode-wide", "attention.latent-decode")


def checks(ops: Ops, device: str, dtype: torch.dtype) -> Iterator[ProductResult]:
    """HIP graphs that are replayed with other lengths, and the order of two streams."""
    graphs = GraphChecks(ops, device, dtype, CudaRecorder, partial(SideStream, torch.cuda))
    yield from run(graphs.tests(GRAPHS))
