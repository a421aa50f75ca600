"""The test cases of the ops, and the check of an implementation against the reference."""

from __future__ import annotations

from . import activation, attention, kv, layer, linear, lora, moe, norm, rope, sampling, state
from .case import Case

CASES: tuple[Case, ...] = tuple(
    case
    for family in (norm, activation, rope, linear, moe, lora, kv, attention, sampling, state, layer)
    for case in family.CASES
)
