"""Every op has the parts that docs/develop/add-a-kernel.md requires: fake, wrapper, source, cases, benchmark."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from localllm import kernels
from localllm.backends.cpu import device
from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases import CASES

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

from shapes import TINY, TINY_MOE
from works import FORMATS, families

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
    works = families(TINY, TINY_MOE, list(FORMATS), [1], torch.float32)
    return {work.op for family in works.values() for work in family}


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
