"""The implementation of each op on each torch device: the matrix op × platform, for doctor and the docs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from ..kernels.ops import MultiPlatformOp, Ops
from . import ORDER
from .pytorch.references import with_references


def platforms() -> dict[str, Ops]:
    """Backend name -> ops, for backends with a `device` module. Imports torch, and no vendor library."""
    modules = {name: f"{__package__}.{name}.device" for name in ORDER}
    return {name: import_module(module).OPS for name, module in modules.items() if find_spec(module)}


def matrix(reference_ops: Sequence[str] = ()) -> list[MultiPlatformOp]:
    """Every op by platform, with the ops in `reference_ops` reset to their references. Raises SettingRefused for an
    unknown name."""
    return MultiPlatformOp.matrix({name: with_references(ops, reference_ops) for name, ops in platforms().items()})
