"""Screenshots of the main screens. `pytest tests/app/tui --snapshot-update` accepts a change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

from localllm.app.errors import WorkerDied
from localllm.app.tui.app import ChatApp
from localllm.app.tui.conversation import Conversation
from localllm.app.tui.models.screen import ModelScreen
from localllm.app.tui.text import clean

from .conftest import wait_until
from .fake_client import HUGE, MACHINE, MAMBA, MISTRAL, OTHER, PIRATE, PIRATE_ENTRY, POET, QWEN, FakeClient

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
SIZES = [(80, 24), (120, 40)]
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
    "hostile": ([[clean("\x1b[31m\u202eevil [red]x[/red] <b>y</b>")]], scene("Try to \x1b[2Jbreak it.")),
    "hints": ([], scene("slash", "s")),
    "models": ([], scene("f2")),
    "download": ([], scene("f2", *"1.7b", "ctrl+d")),
    "settings": ([], scene("f4", "tab")),
    "adapters": ([], scene("f5", "down")),
    "comparison": (
        [[ANSWER], ["Arr, `localllm list` be the command, matey!"]],
        scene("/compare pirate=0.5", "How do I get models?", "right"),
    ),
    "history": ([["Snakes are fine."], ["Yes."]], scene("Tell me about snakes.", "/new", "Are they fine?", "f3")),
    "help": ([], scene("f1")),
}


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", SCENES)
def test_screen(name: str, size: tuple[int, int], make_app: Callable[..., ChatApp], snap_compare) -> None:
    script, play = SCENES[name]
    conversation = Conversation("guide", "Be brief.", {"temperature": 0.7})
    client = FakeClient(*script)
    client.folders = [PIRATE, OTHER, POET]
    client.machine = MACHINE
    client.offers = [HUGE, QWEN]
    client.loaded_adapters = [PIRATE_ENTRY]
    assert snap_compare(make_app(client, conversation), terminal_size=size, run_before=play)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("key", ["down", "ctrl+o"])
def test_results_of_a_search(
    key: str, size: tuple[int, int], make_app: Callable[..., ChatApp], snap_compare: Callable[..., bool]
) -> None:
    """`down` highlights the next result, which is inspected; `ctrl+o` opens the details of the first result."""

    async def play(pilot: Pilot[int]) -> None:
        await scene("f2", *"mistral", "enter")(pilot)
        screen = pilot.app.screen
        assert isinstance(screen, ModelScreen)
        await wait_until(pilot, lambda: MISTRAL.id in screen.assessments)
        await pilot.press(key)
        await wait_until(pilot, lambda: key != "down" or MAMBA.id in screen.assessments)
        await pilot.pause(0.1)

    client = FakeClient()
    client.machine = MACHINE
    assert snap_compare(make_app(client), terminal_size=size, run_before=play)


@pytest.mark.parametrize("name", ["welcome", "answer"])
def test_screen_in_light_colours(name: str, make_app: Callable[..., ChatApp], snap_compare) -> None:
    script, play = SCENES[name]
    app = make_app(FakeClient(*script))
    app.theme = "localllm-light"
    assert snap_compare(app, run_before=play)


@pytest.mark.parametrize("name", ["answer", "comparison"])
def test_small_terminal(name: str, make_app: Callable[..., ChatApp], snap_compare) -> None:
    script, play = SCENES[name]
    client = FakeClient(*script)
    client.loaded_adapters = [PIRATE_ENTRY]
    assert snap_compare(make_app(client), terminal_size=(40, 12), run_before=play)


def test_a_conversation_with_a_large_model(make_app: Callable[..., ChatApp], snap_compare, tmp_path: Path) -> None:
    app = make_app(FakeClient(["Fine."]), Conversation("Qwen/Qwen3-4B"))
    assert snap_compare(app, run_before=SCENES["answer"][1])
