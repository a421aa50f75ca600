"""Replaces ops by their references, which helps a developer to find a wrong kernel."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from ...engine.errors import SettingRefused
from ...kernels.ops import Ops


def with_references(ops: Ops, names: Sequence[str]) -> Ops:
    """`ops` with the named ops ("family.op", "family" or "all") replaced by their references; see kernels/ops.

    Raises SettingRefused for an unknown name.
    """
    try:
        return ops.with_references(names)
    except KeyError as error:
        raise _unknown(str(error.args[0])) from None


def _unknown(name: str) -> SettingRefused:
    names = [op for op, _ in Ops()]
    families = dict.fromkeys(op.partition(".")[0] for op in names)
    supported = ["all", *families, *names]
    similar = difflib.get_close_matches(name, supported, n=1)
    hint = f"did you mean {similar[0]}?" if similar else f"supported names: {', '.join(supported)}"
    return SettingRefused(f"reference_ops: unknown op {name!r}", hint)
