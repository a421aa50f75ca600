"""The choice of the steps that a conversation needs: each choice is rendered, and the best prompt counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...errors import TemplateFailed
from .adaptation import STEPS, Step
from .messages import Conversation
from .renderer import TemplateExceeded
from .skeleton import Score

# In the order in which they are tried: no step, each step, the first steps together.
_CHOICES: tuple[tuple[Step, ...], ...] = (
    (),
    *((step,) for step in STEPS),
    *(STEPS[:count] for count in range(2, len(STEPS) + 1)),
)


@dataclass(frozen=True)
class Attempt:
    """A prompt, and the steps that lead to it."""

    steps: tuple[Step, ...]
    prompt: str
    score: Score


class Trials:
    """Renders one conversation with different steps. No changed conversation is rendered twice."""

    def __init__(
        self,
        conversation: Conversation,
        render: Callable[[Conversation], str],
        score: Callable[[str], Score],
        complete: Score,
    ) -> None:
        """`render` raises TemplateFailed. `score`: of a prompt. `complete`: no prompt has a greater score."""
        self._conversation = conversation
        self._render = render
        self._score = score
        self._complete = complete
        self._results: list[tuple[Conversation, Attempt | TemplateFailed]] = []

    def best(self) -> Attempt:
        """The attempt with the greatest score; of equal ones, that with the fewest and least changes.

        Raises TemplateExceeded at once, and the first TemplateFailed if all attempts fail.
        """
        best = max(self._attempts(), key=lambda attempt: attempt.score, default=None)
        if best is None:
            raise next(result for _, result in self._results if isinstance(result, TemplateFailed))
        for step in reversed(best.steps):
            fewer = self._result(tuple(other for other in best.steps if other is not step))
            if isinstance(fewer, Attempt) and fewer.score == best.score:
                best = fewer
        return best

    def _attempts(self) -> Iterator[Attempt]:
        """The attempts that do not fail, up to one with the complete score."""
        for steps in _CHOICES:
            result = self._result(steps)
            if isinstance(result, Attempt):
                yield result
                if result.score == self._complete:
                    return

    def _result(self, steps: tuple[Step, ...]) -> Attempt | TemplateFailed:
        changed = applied(steps, self._conversation)
        for conversation, result in self._results:
            if conversation == changed:
                return replace(result, steps=steps) if isinstance(result, Attempt) else result
        result = self._attempt(steps, changed)
        self._results.append((changed, result))
        return result

    def _attempt(self, steps: tuple[Step, ...], changed: Conversation) -> Attempt | TemplateFailed:
        try:
            prompt = self._render(changed)
        except TemplateExceeded:
            raise
        except TemplateFailed as error:
            return error
        return Attempt(steps, prompt, self._score(prompt))


def applied(steps: Sequence[Step], conversation: Conversation) -> Conversation:
    """The conversation after the steps."""
    for step in steps:
        conversation = step(conversation)
    return conversation
