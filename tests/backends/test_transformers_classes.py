"""The lists in backends/pytorch/transformers_code/verdicts.py, from a tiny model of every causal decoder class."""

from __future__ import annotations

import pytest

from localllm.backends.pytorch.transformers_code.check import check
from localllm.backends.pytorch.transformers_code.classes import config_of
from localllm.backends.pytorch.transformers_code.verdicts import REFUSED, RIGHT
from localllm.engine.errors import ModelRefused

from .transformers_classes import config_values, model_types

SAMPLE = ("apertus", "bloom", "dots1", "opt", "rwkv")


def outcome(model_type: str) -> str:
    """The reason why the tiny model is refused; empty if its logits are right."""
    try:
        check(config_of(config_values(model_type)))
    except ModelRefused as error:
        return str(error)
    return ""


def assert_listed(model_type: str) -> None:
    reason = outcome(model_type)
    assert bool(reason) == (model_type in REFUSED), reason
    assert (not reason) == (model_type in RIGHT), reason


@pytest.mark.parametrize("model_type", SAMPLE)
def test_some_classes_are_right_or_refused(model_type: str) -> None:
    assert_listed(model_type)


def test_every_class_is_listed() -> None:
    assert sorted([*RIGHT, *REFUSED]) == model_types()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", model_types())
def test_every_class_is_right_or_refused(model_type: str) -> None:
    assert_listed(model_type)
