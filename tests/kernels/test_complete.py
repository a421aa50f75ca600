"""Every op has the parts that docs/develop/add-a-kernel.md requires: fake, wrapper, source, cases, benchmark."""

from __future__ import annotations

import sys
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
import torch

from localllm import kernels
from localllm.backends.cpu import device
from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases import CASES

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

import attention_works as attention
import elements_works as elements
import linear_works as linear
import lora_works as lora
import moe_works as moe
import sampling_works as sampling

FOLDER = Path(next(iter(kernels.__path__)))

pytestmark = pytest.mark.skipif(bool(device.MISSING), reason=device.MISSING or "the library is there")


def writing() -> set[str]:
    """The library's ops that write their results into tensor arguments."""
    names = (name.removeprefix("localllm::") for name in torch._C._dispatch_get_all_op_names())
    known = (getattr(torch.ops.localllm, name, None) for name in names if "::" not in name)
    schemas = (packet.default._schema for packet in known if packet is not None)
    return {schema.name.split("::")[1] for schema in schemas if schema.is_mutable}


@cache
def benchmarked() -> set[str]:
    """The ops that scripts/bench/kernels.py measures."""
    works = chain(
        linear.works(("bf16", "int8", "int4", "int4_wide", "fp8", "mxfp4"), [1], [(64, 64)], torch.float32),
        moe.works(("bf16", "int8", "int4", "int4_wide", "fp8", "mxfp4"), [1], moe.Model(8, 2, 64, 32), torch.float32),
        attention.works(4, 2, 8, torch.float32),
        attention.latent_works(4, 8, 32, torch.float32),
        elements.works(elements.Model(64, 64, 4, 2, 8, 32, torch.float32)),
        sampling.works(32),
        lora.works([(64, 64)], 32, torch.float32),
    )
    return {work.op for work in works}


def test_every_torch_op_has_a_fake_and_a_wrapper() -> None:
    from localllm.kernels.cpu import OPS_WITHOUT_RESULT

    wrappers = "\n".join(
        file.read_text("utf-8") for part in ("cpu", "compiled") for file in (FOLDER / part).rglob("*.py")
    )
    assert writing() == set(OPS_WITHOUT_RESULT)
    assert writing() == {name for name in writing() if f"torch.ops.localllm.{name}.default" in wrappers}


@pytest.mark.parametrize(("name", "implementation"), list(device.OPS), ids=[name for name, _ in device.OPS])
def test_every_kernel_has_its_source_its_cases_and_a_benchmark(name: str, implementation: object) -> None:
    if implementation is dict(Ops())[name]:
        return
    stem = implementation.__module__.rpartition(".")[2]
    assert list((FOLDER / "cpu").rglob(f"{stem}.cpp")), "wrapper and source have the same stem"
    if name not in ("linear.pack_slices", "moe.pack_slices", "layer.prepare", "layer.prepare_stack"):
        assert any(case.op == name for case in CASES)
        assert name in ("layer.decoder", "layer.decoders") or name in benchmarked(), (
            "a layer is what models' benchmarks measure"
        )
