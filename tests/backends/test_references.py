"""Ops replaced by their references by name. An unknown name is refused with a similar name."""

from __future__ import annotations

import pytest

from localllm.backends.pytorch.references import with_references
from localllm.engine.errors import SettingRefused
from localllm.kernels.ops import Ops


@pytest.mark.parametrize(
    ("name", "hint"),
    [("nrm.rms", "did you mean norm.rms?"), ("rop", "did you mean rope?"), ("al", "did you mean all?")],
)
def test_unknown_op_gets_a_similar_name(name: str, hint: str) -> None:
    with pytest.raises(SettingRefused, match=f"reference_ops: unknown op '{name}'") as refused:
        with_references(Ops(), ["norm", name])
    assert refused.value.hint == hint


def test_unknown_op_gets_the_list_of_names() -> None:
    with pytest.raises(SettingRefused) as refused:
        with_references(Ops(), ["?"])
    names = refused.value.hint.removeprefix("supported names: ").split(", ")
    assert names == ["all", *dict.fromkeys(op.partition(".")[0] for op, _ in Ops()), *(op for op, _ in Ops())]
