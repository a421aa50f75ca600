from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from localllm.app.chat.template.adaptation import (
    STEPS,
    developer_as_system,
    instructions_as_users,
    merged_instructions,
)
from localllm.app.chat.template.messages import Conversation
from localllm.app.chat.template.renderer import TemplateExceeded
from localllm.app.chat.template.skeleton import Score
from localllm.app.chat.template.trials import Trials
from localllm.app.errors import TemplateFailed

CONVERSATION = Conversation(
    [{"role": role, "content": text} for role, text in (("developer", "a"), ("system", "b"), ("user", "c"))]
)


def roles(conversation: Conversation) -> str:
    return " ".join(message["role"] for message in conversation.messages)


def trials(score: Callable[[str], int], render: Callable[[Conversation], str] = roles) -> Trials:
    return Trials(CONVERSATION, render, lambda prompt: Score(score(prompt), 0), Score(9, 0))


@pytest.mark.parametrize(
    ("scores", "steps"),
    [
        ({"developer system user": 9}, ()),
        ({"developer system user": 0}, ()),
        ({"system system user": 5}, (developer_as_system,)),
        ({"developer user": 9, "user": 9}, (merged_instructions,)),
        ({"developer system user": 1, "system user": 5}, (developer_as_system, merged_instructions)),
        ({"developer user user": 5, "system user user": 9}, (instructions_as_users,)),  # no first steps lead to the 9
    ],
)
def test_the_fewest_steps_with_the_best_score_count(scores: dict[str, int], steps: tuple[Any, ...]) -> None:
    assert trials(lambda prompt: scores.get(prompt, -1)).best().steps == steps


def test_no_conversation_is_rendered_twice() -> None:
    prompts: list[Conversation] = []

    def render(conversation: Conversation) -> str:
        assert conversation not in prompts
        prompts.append(conversation)
        return roles(conversation)

    trials(lambda _: 0, render).best()
    assert 3 < len(prompts) < 2 * len(STEPS)


def test_the_first_failure_counts_if_all_attempts_fail() -> None:
    def render(conversation: Conversation) -> str:
        raise TemplateFailed(roles(conversation))

    with pytest.raises(TemplateFailed, match="developer system user"):
        trials(lambda _: 0, render).best()


def test_an_exceeded_limit_ends_the_trials() -> None:
    def render(conversation: Conversation) -> str:
        raise (TemplateFailed if "developer" in roles(conversation) else TemplateExceeded)("x")

    with pytest.raises(TemplateExceeded):
        trials(lambda _: 0, render).best()
