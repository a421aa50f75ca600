"""Without the CUDA library Triton computes every op that it has a kernel for."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from localllm import kernels
from localllm.kernels.compiled.library import LibraryNotFound
from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases import CASES
from localllm.kernels.ops.cases.case import Case
from localllm.kernels.ops.cases.reference_check import call_op

pytest.importorskip("triton")
FOLDER = Path(next(iter(kernels.__path__))) / "triton"


def triton_functions(family: str) -> dict[str, FunctionType]:
    """The functions of the Triton modules, without the modules of other families of ops."""
    others = {name.partition(".")[0] for name, _ in Ops()} - {family}
    stems = [file.stem for file in FOLDER.glob("[a-z]*.py") if file.stem not in others]
    modules = [importlib.import_module(f"localllm.kernels.triton.{stem}") for stem in stems]
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__
    }


def test_triton_is_used_without_the_library() -> None:
    from localllm.kernels.triton.ops import with_triton

    chosen = dict(with_triton(Ops()))
    expected = {}
    for name, reference in Ops():
        functions = triton_functions(name.partition(".")[0])
        if reference.__name__ in functions:
            expected[name] = functions[reference.__name__]
    assert {"linear.int8", "linear.int4", "linear.int4_wide", "linear.fp8", "lora.embedding"} <= set(expected)
    assert {name: chosen[name] for name in expected} == expected


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.op.split(".")[0] in ("norm", "activation", "rope")], ids=str
)
def test_traces_use_the_references(case: Case) -> None:
    """graphs=split traces a forward with tensors that have no memory."""
    from localllm.kernels.triton.ops import with_triton

    arguments = case.make(torch.Generator().manual_seed(1), torch.float32)
    expected = call_op(case, dict(Ops())[case.op], dict(arguments))
    with FakeTensorMode() as mode:
        fake = {
            name: mode.from_tensor(one) if isinstance(one, torch.Tensor) else one for name, one in arguments.items()
        }
        found = call_op(case, dict(with_triton(Ops()))[case.op], fake)
    assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in expected]


def test_the_version_is_read_from_a_package_with_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some builds of torch install Triton under another name."""
    import triton

    from localllm.backends.cuda import device

    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    monkeypatch.setattr(device, "Driver", lambda: SimpleNamespace(version=lambda: "580"))
    driver, version, *_ = device._versions()
    assert (driver, version) == ("580", triton.__version__)


def test_a_library_that_a_variable_names_must_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("localllm.kernels.cpu", reason="the library is not built", exc_type=ImportError)
    monkeypatch.setenv("LOCALLLM_CUDA_LIBRARY", str(tmp_path / "none.so"))
    monkeypatch.delitem(sys.modules, "localllm.kernels.cuda", raising=False)
    with pytest.raises(LibraryNotFound, match=r"LOCALLLM_CUDA_LIBRARY names .*none\.so, which is not a file"):
        importlib.import_module("localllm.kernels.cuda")
