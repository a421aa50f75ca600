"""The wishes of a client as variables of a template."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.app.chat.template.switches import switches

QWEN = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
GRANITE = "{% if thinking %}think{% endif %}"
OSS = "Reasoning: {{ reasoning_effort }}"
BOTH = "{{ enable_thinking }}{{ reasoning_effort }}"


@pytest.mark.parametrize(
    ("template", "reasoning", "variables", "ignored"),
    [
        (QWEN, "none", {"enable_thinking": False}, []),
        (QWEN, "minimal", {"enable_thinking": False}, []),
        (QWEN, "low", {"enable_thinking": True}, []),
        (QWEN, "on", {"enable_thinking": True}, []),
        (GRANITE, "high", {"thinking": True}, []),
        (OSS, "high", {"reasoning_effort": "high"}, []),
        (OSS, "on", {}, []),
        (BOTH, "none", {"enable_thinking": False}, []),
        (BOTH, "low", {"enable_thinking": True, "reasoning_effort": "low"}, []),
        ("plain", "low", {}, ["reasoning"]),
        ("Don't show thinking. {% if x %}{{ raise('no thinking') }}{% endif %}", "low", {}, ["reasoning"]),
        ("{{ message.thinking }}{{ message['reasoning_effort'] }}", "low", {}, ["reasoning"]),
        ("{{ my_enable_thinking_x }}", "none", {}, ["reasoning"]),
        ("plain", None, {}, []),
    ],
)
def test_reasoning(template: str, reasoning: Any, variables: dict[str, Any], ignored: list[str]) -> None:
    chosen = switches(template, {}, reasoning, None, is_harmony=False)
    assert (chosen.variables, chosen.ignored) == (variables, ignored)


@pytest.mark.parametrize(
    ("level", "effort"), [("none", "low"), ("minimal", "low"), ("medium", "medium"), ("max", "high")]
)
def test_harmony_has_three_levels(level: Any, effort: str) -> None:
    assert switches(OSS, {}, level, None, is_harmony=True).variables == {"reasoning_effort": effort}


def test_variables_of_the_client_precede_and_unknown_ones_are_reported() -> None:
    chosen = switches(QWEN, {"enable_thinking": True, "date_string": "x"}, "none", "low", is_harmony=False)
    assert chosen.variables == {"enable_thinking": True, "date_string": "x"}
    assert chosen.ignored == ["date_string", "verbosity"]
    assert switches("{{ verbosity }}", {}, None, "low", is_harmony=False).variables == {"verbosity": "low"}


@pytest.mark.parametrize("part", ["{{", "{{'", "'\\", "{{\"\\'", "{% '"])
def test_a_hostile_template_takes_linear_time(part: str) -> None:
    """Quadratic time would be minutes."""
    assert switches(part * (2**18 // len(part)), {}, "low", None, is_harmony=False).ignored == ["reasoning"]
