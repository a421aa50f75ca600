"""One screenshot of each screen, and of each state of the chat that differs in kind.

`pytest tests/app/tui --snapshot-update` accepts a change. Sizes: test_screens.py and test_robust.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from textual.pilot import Pilot

from localllm.app.errors import WorkerDied
from localllm.app.tui.app import ChatApp
from localllm.app.tui.conversation import Conversation
from localllm.app.tui.models.screen import ModelScreen

from .conftest import wait_until
from .fake_client import HUGE, MACHINE, MISTRAL, OTHER, PIRATE, PIRATE_ENTRY, POET, QWEN, FakeClient

ANSWER = """Use the **manager**:

1. `localllm list` shows what is here.
2. `localllm pull org/repo` fetches more.

```python
def greet(name: str) -> str:
    return f"Hello, {name}!"  # [bold]not markup[/bold]
```

| command | does |
|---|---|
| `ps` | loaded models |
"""
Scene = Callable[[Pilot[int]], Awaitable[None]]


def scene(*steps: str) -> Scene:
    """Each step is a key, or a line to send if it contains a space or starts with a slash."""

    async def play(pilot: Pilot[int]) -> None:
        async def settle() -> None:
            await wait_until(pilot, lambda: not any(worker.is_running for worker in pilot.app.workers))
            await pilot.pause()

        await settle()
        for step in steps:
            if " " in step or step.startswith("/"):
                pilot.app.screen.query_one("Prompt").insert(step)
                await pilot.press("enter")
            else:
                await pilot.press(step)
            await settle()
        pilot.app.clear_notifications()
        await pilot.pause()

    return play


SCENES: dict[str, tuple[list[list], Scene]] = {
    "welcome": ([], scene()),
    "answer": ([[ANSWER]], scene("How do I get models?")),
    "branches": ([["First."], ["Second."]], scene("Tell me a number.", "ctrl+r", "up")),
    "failed": ([["half an ans", WorkerDied("the engine process ended")]], scene("What is a daemon?")),
    "hints": ([], scene("slash", "s")),
    "download": ([], scene("f2", *"1.7b", "ctrl+d")),
    "models": ([], scene("f2")),
    "settings": ([], scene("f4", "tab")),
    "adapters": ([], scene("f5", "down")),
    "comparison": (
        [[ANSWER], ["Arr, `localllm list` be the command, matey!"]],
        scene("/compare pirate=0.5", "How do I get models?", "right"),
    ),
    "history": ([["Snakes are fine."], ["Yes."]], scene("Tell me about snakes.", "/new", "Are they fine?", "f3")),
}
LIGHT = ("branches",)


@pytest.mark.parametrize("name", SCENES)
def test_screen(name: str, make_app: Callable[..., ChatApp], snap_compare: Callable[..., bool]) -> None:
    script, play = SCENES[name]
    client = FakeClient(*script)
    client.folders = [PIRATE, OTHER, POET]
    client.machine = MACHINE
    client.offers = [HUGE, QWEN]
    client.loaded_adapters = [PIRATE_ENTRY]
    app = make_app(client, Conversation("guide", "Be brief.", {"temperature": 0.7}))
    if name in LIGHT:
        app.theme = "localllm-light"
    assert snap_compare(app, terminal_size=(100, 30), run_before=play)


def test_details_of_a_search_result(make_app: Callable[..., ChatApp], snap_compare: Callable[..., bool]) -> None:
    async def play(pilot: Pilot[int]) -> None:
        await scene("f2", *"mistral", "enter")(pilot)
        screen = pilot.app.screen
        assert isinstance(screen, ModelScreen)
        await wait_until(pilot, lambda: MISTRAL.id in screen.browser.assessments)
        await pilot.press("ctrl+o")
        await pilot.pause(0.1)

    client = FakeClient()
    client.machine = MACHINE
    assert snap_compare(make_app(client), terminal_size=(100, 30), run_before=play)
