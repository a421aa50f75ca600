"""Chooses implementations of ops by name (LOCALLLM_DEV_OPS), which helps a developer to find a wrong kernel."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from ...engine.errors import SettingRefused
from ...kernels.ops import Ops
from ...kernels.ops.register import KernelSet

ALL = "all"


def with_forced(ops: Ops, kernels: Sequence[KernelSet], choices: Sequence[str]) -> Ops:
    """`ops` with the `choices` "name=implementation". name: "family.op", "family" or "all"; implementation: the name of
    a set of `kernels`, which computes these ops. Of two choices for an op, the last one is used.

    Raises SettingRefused for a name or an implementation that does not exist, and for a choice that another one undoes.
    """
    chosen: dict[str, tuple[KernelSet, str]] = {}
    for choice in choices:
        chosen |= dict.fromkeys(*_served(choice, kernels))
    # A fused op comes from the slowest set of its parts, so it contains no part that was replaced.
    for one in kernels:
        ops = ops.with_ops_of(one.ops, [name for name, (kernel_set, _) in chosen.items() if kernel_set is one])
    used = dict(ops)
    for name, (one, choice) in chosen.items():
        if used[name] is not dict(one.ops)[name] and not choice.startswith(ALL):
            raise SettingRefused(
                f"ops: {choice} has no effect on {name}: it contains or packs for an op that another choice replaces",
                f"leave out {choice}, or choose {one.name} for the other op too",
            )
    return ops


def _served(choice: str, kernels: Sequence[KernelSet]) -> tuple[list[str], tuple[KernelSet, str]]:
    """The ops that a choice replaces, and (the set that has them, the choice)."""
    name, _, implementation = choice.partition("=")
    names = _names(name, implementation)
    served = {kernel_set: [op for op in names if kernel_set.serves(op)] for kernel_set in kernels}
    existing = {kernel_set.name: kernel_set for kernel_set, ops in served.items() if ops}
    if implementation not in existing:
        message = f"ops: {name} has no implementation {implementation!r}"
        raise SettingRefused(message, f"implementations on this device: {', '.join(existing)}")
    kernel_set = existing[implementation]
    return served[kernel_set], (kernel_set, choice)


def _names(name: str, implementation: str) -> list[str]:
    """The ops that `name` means. Raises SettingRefused for an unknown name, or without an implementation."""
    ops = [op for op, _ in Ops() if name in (ALL, op, op.partition(".")[0])]
    if not ops:
        raise _unknown(name)
    if not implementation:
        raise SettingRefused(f"ops: {name!r} names no implementation", f"write {name}=reference, for example")
    return ops


def _unknown(name: str) -> SettingRefused:
    names = [op for op, _ in Ops()]
    supported = [ALL, *dict.fromkeys(op.partition(".")[0] for op in names), *names]
    similar = difflib.get_close_matches(name, supported, n=1)
    hint = f"did you mean {similar[0]}?" if similar else f"supported names: {', '.join(supported)}"
    return SettingRefused(f"ops: unknown op {name!r}", hint)
