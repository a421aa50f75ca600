"""Implementations that LOCALLLM_DEV_OPS chooses by name. A name that does not exist is refused, with those that do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from localllm.backends.pytorch.forced import with_forced
from localllm.engine.errors import SettingRefused
from localllm.kernels.ops import Ops
from localllm.kernels.ops.activation import Activation
from localllm.kernels.ops.layer import Layer
from localllm.kernels.ops.norm import Norm
from localllm.kernels.ops.register import REFERENCES, KernelSet


def second(*_: Any) -> Any: ...
def first(*_: Any) -> Any: ...
def fused(*_: Any) -> Any: ...


SECOND = replace(Ops(), norm=Norm(rms=second), activation=Activation(silu_and_mul=second))
FIRST = replace(SECOND, norm=Norm(rms=first, add_rms=first), layer=Layer(decoder=fused))
KERNELS = (KernelSet("first", FIRST, base=SECOND), KernelSet("second", SECOND), REFERENCES)


def changed(*choices: str) -> dict[str, Any]:
    """The ops that differ from the references."""
    native = dict(Ops())
    return {name: op for name, op in with_forced(FIRST, KERNELS, choices) if op is not native[name]}


def test_chosen_implementations_replace_an_op_a_family_or_all() -> None:
    silu = {"activation.silu_and_mul": second}
    assert changed() == silu | {"norm.rms": first, "norm.add_rms": first, "layer.decoder": fused}
    assert changed("norm.rms=second") == silu | {"norm.rms": second, "norm.add_rms": first}
    assert changed("norm=second") == changed("norm.rms=second"), "the set has one norm"
    assert changed("norm=reference") == silu
    assert changed("norm=reference", "norm.rms=first") == silu | {"norm.rms": first}, "no fused op with other norms"
    assert changed("all=reference") == {}
    assert changed("all=reference", "norm=first") == {"norm.rms": first, "norm.add_rms": first}
    assert changed("all=first", "norm=reference") == silu


@pytest.mark.parametrize(
    ("choice", "reason", "hint"),
    [
        ("nrm.rms=first", "unknown op 'nrm.rms'", "did you mean norm.rms?"),
        ("rop=first", "unknown op 'rop'", "did you mean rope?"),
        ("al=reference", "unknown op 'al'", "did you mean all?"),
        ("norm.rms=thrid", "norm.rms has no implementation 'thrid'", "first, second, reference"),
        ("norm.add_rms=second", "norm.add_rms has no implementation 'second'", "first, reference"),
        ("rope=first", "rope has no implementation 'first'", ": reference"),
        ("layer=first", "layer=first has no effect on layer.decoder", "leave out layer=first"),
        ("norm.rms", "'norm.rms' names no implementation", "write norm.rms=reference"),
        ("norm.rms=", "'norm.rms' names no implementation", "write norm.rms=reference"),
    ],
)
def test_wrong_names_are_refused(choice: str, reason: str, hint: str) -> None:
    with pytest.raises(SettingRefused, match=f"ops: {reason}") as refused:
        with_forced(FIRST, KERNELS, ["norm=reference", choice])
    assert hint in refused.value.hint


def test_unknown_op_gets_the_list_of_names() -> None:
    with pytest.raises(SettingRefused) as refused:
        with_forced(Ops(), KERNELS, ["?=reference"])
    names = refused.value.hint.removeprefix("supported names: ").split(", ")
    assert names == ["all", *dict.fromkeys(op.partition(".")[0] for op, _ in Ops()), *(op for op, _ in Ops())]
