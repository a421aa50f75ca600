"""The register of the ops with every torch device, for `localllm doctor` and the docs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..engine.errors import SettingRefused
from ..kernels.ops import Ops
from ..kernels.ops.register import REFERENCES, KernelSet, MultiPlatformOp, Platform, dotted, register
from . import ORDER
from .mlx.ops import OPS as MLX
from .pytorch.forced import with_forced
from .pytorch.plugins import Plugin, with_plugins

if TYPE_CHECKING:
    from .pytorch.product_check import ProductResult

DEVICES = {"cuda": "cuda", "hip": "cuda", "npu": "npu", "xpu": "xpu"}  # backend -> torch's type of its device


def platforms() -> dict[str, Ops]:
    """Backend name -> ops, of the backends in kernel_sets."""
    return {name: kernels[0].ops for name, kernels in kernel_sets().items()}


def kernel_sets() -> dict[str, tuple[KernelSet, ...]]:
    """Backend name -> sets of kernels, for each backend that has a `device` module. Imports torch but no vendor
    library."""
    names = [name for name in ORDER if find_spec(f"{__package__}.{name}.device")]
    modules = {name: vars(import_module(f"{__package__}.{name}.device")) for name in names}
    return {
        name: variables.get("KERNELS") or (KernelSet(name, variables["OPS"]), REFERENCES)
        for name, variables in modules.items()
    }


def device_checks(name: str, dtype: str) -> Iterator[ProductResult]:
    """Tests the ops of a backend's GPU or NPU, its products with the widths of real models, and what its module `check`
    tests; yields nothing for other backends.

    `dtype`: the name of the activations' dtype. Imports torch.
    """
    if name not in DEVICES:
        return
    import torch

    from .pytorch.product_check import run_ops, run_products

    arguments = platforms()[name], DEVICES[name], getattr(torch, dtype)
    if find_spec(f"{__package__}.{name}.check"):
        yield from import_module(f"{__package__}.{name}.check").checks(*arguments)
    yield from run_ops(*arguments)
    yield from run_products(*arguments)


@dataclass(frozen=True, slots=True)
class Listed:
    """A set of kernels in the table."""

    platform: str
    name: str  # in LOCALLLM_DEV_OPS
    capability: str  # the minimum, e.g. 8.0; empty: none
    ops: int  # number of ops that it implements


@dataclass(frozen=True, slots=True)
class Matrix:
    """Each op with its implementations on every platform."""

    ops: Mapping[str, MultiPlatformOp]
    refused: Mapping[str, SettingRefused]  # platform -> the error of a load there

    def names(self) -> dict[str, dict[str, str]]:
        """Op -> platform -> the name of its implementation; also MLX's functions, and the definitions."""
        return {
            name: {
                **{platform: op.source(platform) for platform in op.forward},
                "mlx": MLX.get(name, "-"),
                "native": "torch",
            }
            for name, op in self.ops.items()
        }

    def kernels(self) -> list[Listed]:
        """Every set but the references."""
        counts = Counter(
            (platform, one)
            for op in self.ops.values()
            for platform, sets in op.implementations.items()
            for one in sets[:-1]
        )
        rows = [Listed(platform, one.name, dotted(one.capability), ops) for (platform, one), ops in counts.items()]
        return sorted(rows, key=lambda row: ORDER.index(row.platform))


def matrix(
    platforms: Mapping[str, Sequence[KernelSet]], plugins: Sequence[Plugin] = (), choices: Sequence[str] = ()
) -> Matrix:
    """The implementations that models use unless a self-test rejects them. `choices`: see with_forced.

    Raises SettingRefused for an unknown op, and for an implementation that no platform has.
    """
    columns: dict[str, Platform] = {}
    refused: dict[str, SettingRefused] = {}
    for platform, kernels in platforms.items():
        ops, kernels = with_plugins(kernels[0].ops, kernels, platform, plugins)
        try:
            ops = with_forced(ops, kernels, choices)
        except SettingRefused as error:
            refused[platform] = error
        columns[platform] = Platform(ops, kernels)
    if len(refused) == len(platforms):
        raise next(iter(refused.values()))
    return Matrix(register(columns), refused)
