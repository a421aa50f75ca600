"""The table of the functions of MLX names ops and functions that exist."""

from __future__ import annotations

from importlib import import_module

import pytest

from localllm.backends.mlx.ops import OPS
from localllm.kernels.ops import Ops

MODULES = {"mx": "mlx.core", "nn": "mlx.nn", "mlx_lm": "mlx_lm.models", "sampler": "localllm.backends.mlx.sampler"}


def test_only_ops_are_named() -> None:
    assert set(OPS) <= {name for name, _ in Ops()}


@pytest.mark.parametrize("name", sorted(set(OPS.values())))
def test_functions_exist(name: str) -> None:
    pytest.importorskip("mlx_lm")
    package, *path, function = name.split(".")
    if package == "mlx_lm":
        assert callable(getattr(import_module(".".join((MODULES[package], *path))), function))
        return
    found = import_module(MODULES[package])
    for part in (*path, function):
        found = getattr(found, part)
    assert callable(found)
