"""The model screen: models, downloads and the catalog."""

from __future__ import annotations

import pytest
from msgspec import structs

from localllm.app.client import Catalog, Job, ModelEntry
from localllm.app.tui.model_rows import bar, duration, progress, rows
from localllm.app.tui.models import Models, ModelScreen

from .conftest import Chat, OpenChat
from .fake_client import GUIDE, HUGE, LARGE, MACHINE, OTHER, PIRATE, QWEN, SMALL, FakeClient


def client() -> FakeClient:
    fake = FakeClient()
    fake.machine = MACHINE
    fake.offers = [HUGE, QWEN]
    fake.folders = [PIRATE, OTHER]
    return fake


async def open_models(c: Chat) -> ModelScreen:
    await c.pilot.press("f2")
    await c.settle()
    assert isinstance(c.app.screen, ModelScreen)
    return c.app.screen


async def highlight(c: Chat, name: str) -> None:
    """Type a name into the filter, and move the focus to the list."""
    await c.pilot.press("slash" if isinstance(c.app.focused, Models) else "home")
    await c.pilot.press(*name, "down")
    await c.pilot.pause()


async def test_model_screen_judges_models(chat: OpenChat) -> None:
    async with chat(client(), size=(120, 40)) as c:
        await open_models(c)
        shown = c.shown()
        assert "Test CPU (cpu), 12.0 GiB free" in shown
        assert "40,960 tokens · fits this machine · estimated 5 tok/s" in shown
        assert "suggested · 3.8 GiB · fits this machine · estimated 10 tok/s · apache-2.0" in shown
        assert "60.5 GiB · too large for this machine" in shown
        assert "adapters (F5): pirate" in shown
        assert shown.index("Qwen/Qwen3-4B") < shown.index("qwen3:1.7b") < shown.index("qwen3:32b")


async def test_download_runs_pauses_resumes_and_is_cancelled(chat: OpenChat) -> None:
    async with chat(client()) as c:
        await open_models(c)
        await highlight(c, "qwen3:1.7b")
        await c.pilot.press("enter")
        await c.settle()
        assert "downloading · 35% of 3.7 GiB" in c.shown()
        assert "goes on if you close this screen" in c.text_of("#notice")
        for key, state in (("p", "paused"), ("p", "downloading"), ("c", "cancelled")):
            await c.pilot.press(key)
            await c.settle()
            assert c.client.jobs["qwen3:1.7b"].state == state
        assert "a download continues it" in c.shown()
        await c.pilot.press("p")
        await c.settle()
        assert "not being downloaded" in c.text_of("#notice")


async def test_complete_download_becomes_a_model_that_can_be_used(chat: OpenChat) -> None:
    async with chat(client()) as c:
        screen = await open_models(c)
        await highlight(c, "qwen3:1.7b")
        await c.pilot.press("enter")
        await c.settle()
        await c.pilot.press("slash", "home", "ctrl+k")
        c.client.entries = [*c.client.entries, ModelEntry(id="Qwen/Qwen3-1.7B", size=4_100_000_000)]
        c.client.offers = [HUGE, structs.replace(QWEN, installed="Qwen/Qwen3-1.7B")]
        c.client.jobs["qwen3:1.7b"] = Job(name="qwen3:1.7b", state="done", model="Qwen/Qwen3-1.7B")
        screen._poll()
        await c.settle()
        assert "Qwen/Qwen3-1.7B: downloaded" in c.text_of("#notice")
        await c.pilot.press("enter")
        await c.settle()
        assert c.screen.conversation.model == "Qwen/Qwen3-1.7B"


async def test_typed_repository_is_downloaded(chat: OpenChat) -> None:
    async with chat(client()) as c:
        await open_models(c)
        await c.pilot.press(*"org/new", "enter")
        await c.settle()
        assert list(c.client.jobs) == ["org/new"]
        await c.pilot.press("home", "ctrl+k", *"org/missing", "enter")
        await c.settle()
        assert "is not on the hub. check the name" in c.text_of("#notice")


async def test_model_is_deleted_after_a_confirmation(chat: OpenChat) -> None:
    async with chat(client()) as c:
        await open_models(c)
        await c.pilot.press("down", "x")
        await c.settle()
        assert "built in" in c.text_of("#notice")
        await c.pilot.press("slash")
        await highlight(c, SMALL.id[:12])
        for key, count in (("n", 3), ("y", 2)):
            await c.pilot.press("x")
            await c.until(lambda: "Delete HuggingFaceTB/SmolLM2" in c.shown())
            await c.pilot.press(key)
            await c.settle()
            assert len(c.client.entries) == count


async def test_incomplete_model_is_marked_and_its_download_goes_on(chat: OpenChat) -> None:
    fake = client()
    half = ModelEntry(
        id="org/half", size=5, problem="the download is not complete; localllm pull org/half continues it"
    )
    fake.entries = [GUIDE, half]
    async with chat(fake) as c:
        await open_models(c)
        assert "cannot be used: the download is not complete" in c.shown()
        await highlight(c, "org/half")
        await c.pilot.press("enter")
        await c.settle()
        assert isinstance(c.app.screen, ModelScreen)
        assert list(fake.jobs) == ["org/half"]
        assert "downloading · 35%" in c.shown()


def test_rows_show_running_downloads_before_suggestions() -> None:
    catalog = Catalog(machine=MACHINE, offers=[HUGE, QWEN, structs.replace(QWEN, name="a:1", suggested=False)])
    jobs = [Job(name="qwen3:32b", state="downloading"), Job(name="org/x", state="failed", error="no space")]
    names = [row.key for row in rows([GUIDE, LARGE], catalog, jobs, [])]
    assert names == ["guide", LARGE.id, "org/x", "qwen3:32b", "qwen3:1.7b", "a:1"]


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (Job(name="m"), "asking the hub"),
        (
            Job(name="m", state="downloading", received=50, total=200, speed=2**20, eta=90.0),
            "downloading · 25% of 200 B · 1.0 MiB/s · 2 min left",
        ),
        (Job(name="m", state="failed", error="no space", hint="free some"), "failed: no space. free some"),
    ],
)
def test_progress_of_a_download(job: Job, text: str) -> None:
    assert progress(job) == text


def test_bar_and_duration() -> None:
    assert bar(Job(name="m", state="downloading", received=1, total=2), width=4) == "██░░"
    assert bar(Job(name="m", state="done", received=2, total=2)) == ""
    assert [duration(seconds) for seconds in (5, 120, 5400)] == ["5 s", "2 min", "1.5 h"]
