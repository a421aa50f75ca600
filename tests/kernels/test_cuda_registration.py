"""Every op of the CUDA library as torch registers it: schema, fake and tracing agree. Shapes are those of
scripts/cuda_shapes.py."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import cuda_shapes

from .opchecked import Opchecked

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ONLY_HOPPER = {"prefill_attention", "decoder_step"}
SEEDS = 40  # random shapes, some of which other kernels compute


@pytest.mark.real
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", cuda_shapes.KERNELS)
def test_schema_fake_and_tracing_agree(name: str) -> None:
    if name in ONLY_HOPPER and not HOPPER:
        pytest.skip("there is no Hopper GPU")
    pytest.importorskip("localllm.kernels.cuda", exc_type=ImportError)
    with Opchecked() as checked:
        for seed in range(SEEDS):
            cuda_shapes.KERNELS[name](random.Random(seed))
            if any(name.startswith(op) for op in checked.ops):
                break
    assert any(name.startswith(op) for op in checked.ops), f"none of {SEEDS} shapes reached the kernel"


def test_an_op_that_writes_an_argument_without_saying_so_is_found() -> None:
    importlib.import_module("localllm.kernels.cpu")
    library = torch.library.Library("localllm", "FRAGMENT")
    library.define("wrong_for_a_test(Tensor(a!) out, Tensor x) -> ()")
    library.impl("wrong_for_a_test", lambda out, x: (out.copy_(x), x.zero_(), None)[-1], "CPU")
    try:
        with Opchecked(), pytest.raises(Exception, match="x is not defined as mutable but was mutated"):
            torch.ops.localllm.wrong_for_a_test(torch.zeros(3), torch.ones(3))
    finally:
        torch.ops.localllm.__dict__.pop("wrong_for_a_test", None)
        library._destroy()
