"""Ops replaced by their references, to find a wrong kernel."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from ...engine.errors import SettingRefused
from ...kernels.ops import Ops


def with_references(ops: Ops, names: Sequence[str]) -> Ops:
    """These ops, the named ones ("family.op", "family" or "all") computed by their references; see kernels/ops.

    Raises SettingRefused for a name there is not.
    """
    try:
        return ops.with_references(names)
    except KeyError as error:
        raise _unknown(str(error.args[0])) from None


def _unknown(name: str) -> SettingRefused:
    every = [op for op, _ in Ops()]
    known = ["all", *dict.fromkeys(op.partition(".")[0] for op in every), *every]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return SettingRefused(f"reference_ops: unknown op {name!r}", hint)
