"""The compile tests have every Triton kernel: the list comes from the modules, so a new kernel cannot be missing."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton.runtime import JITFunction

sys.path.insert(0, str(Path(__file__).parent))
import test_triton_compile as attention
import test_triton_compile_elements as elements
import test_triton_compile_linear as linear
import test_triton_compile_lora as lora
import test_triton_compile_moe as moe

from localllm.kernels import triton as kernels

pytestmark = [pytest.mark.compile]


def functions() -> dict[str, JITFunction]:
    """All Triton functions of the package, by module and name."""
    modules = [
        importlib.import_module(f"{kernels.__name__}.{each.name}") for each in pkgutil.iter_modules(kernels.__path__)
    ]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]
    return {name_of(each): each for each in found}


def name_of(function: JITFunction) -> str:
    return f"{function.fn.__module__.rpartition('.')[2]}.{function.fn.__name__}"


def is_called(function: JITFunction, others: list[JITFunction]) -> bool:
    """Whether another Triton function calls it, which then compiles it too."""
    call = re.compile(rf"\b{function.fn.__name__}\(")
    return any(call.search(other.src) for other in others if other is not function)


def test_every_kernel_is_compiled() -> None:
    pairs = [*attention.RUNS, *elements.RUNS, *lora.RUNS, *(run.values for run in (*linear.runs(), *moe.runs()))]
    compiled = {name_of(build.kernel) for _, build in pairs}
    every = functions()
    launched = {name for name, each in every.items() if not is_called(each, list(every.values()))}
    assert "lora.shrink" in launched
    assert sorted(launched - compiled) == []
