"""The variables by which clients change a rendering: how much the model reasons, and how long its answers are.

A variable that does not occur in the template has no effect: the caller reports it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...frames import Reasoning

# A string, to its end or that of the template: a search for the end of each one would take quadratic time.
_STRING = re.compile(r"""'(?:[^'\\]|\\.)*(?:'|\Z)|"(?:[^"\\]|\\.)*(?:"|\Z)""", re.DOTALL)
_NAME = re.compile(r"(?<![\w.])[a-z]\w*")  # no attribute
_ON_OFF = ("enable_thinking", "thinking")
_HARMONY: Mapping[Reasoning, str] = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


@dataclass(slots=True)
class Switches:
    """Variables for a template, and the names of those without effect: of a variable, or `reasoning`, `verbosity`."""

    variables: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)


def switches(
    template: str, kwargs: Mapping[str, Any], reasoning: Reasoning | None, verbosity: str | None, *, is_harmony: bool
) -> Switches:
    """The variables that give a template the wishes of a client. `kwargs` precede `reasoning`.

    A template may have a variable with levels, `reasoning_effort`, and one of `enable_thinking` and `thinking`, which
    is true for every level except none and minimal.
    """
    tags = (part.partition("%}")[0].partition("}}")[0] for part in re.split(r"\{[{%]", template)[1:])
    names = set(_NAME.findall(_STRING.sub("", " ".join(tags))))
    chosen = Switches(ignored=[name for name in kwargs if name not in names])
    if reasoning is not None:
        _add_reasoning(chosen, names, reasoning, is_harmony=is_harmony)
    if verbosity is not None:
        if "verbosity" in names:
            chosen.variables["verbosity"] = verbosity
        else:
            chosen.ignored.append("verbosity")
    chosen.variables |= kwargs
    return chosen


def _add_reasoning(chosen: Switches, names: set[str], reasoning: Reasoning, *, is_harmony: bool) -> None:
    switch = next((name for name in _ON_OFF if name in names), None)
    if switch is not None:
        chosen.variables[switch] = reasoning not in ("none", "minimal")
    if "reasoning_effort" in names and reasoning != "on" and (switch is None or reasoning != "none"):
        chosen.variables["reasoning_effort"] = _HARMONY.get(reasoning, reasoning) if is_harmony else reasoning
    if not chosen.variables and not (reasoning == "on" and "reasoning_effort" in names):
        chosen.ignored.append("reasoning")
