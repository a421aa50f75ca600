"""The model screen: models, downloads and the catalog."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from rich.cells import cell_len

from localllm.app.client import Catalog, Job, ModelEntry
from localllm.app.tui.models.facts import bar, bar_text, duration, progress
from localllm.app.tui.models.listing import ModelList
from localllm.app.tui.models.rows import Lists, rows
from localllm.app.tui.models.screen import ModelScreen

from .conftest import Chat, OpenChat
from .fake_client import GUIDE, HUGE, LARGE, MACHINE, OTHER, PIRATE, QWEN, SMALL, FakeClient, inspection


def client() -> FakeClient:
    fake = FakeClient()
    fake.machine = MACHINE
    fake.offers = [HUGE, QWEN]
    fake.folders = [PIRATE, OTHER]
    return fake


@asynccontextmanager
async def models(chat: OpenChat, fake: FakeClient | None = None, **options: Any) -> AsyncIterator[Chat]:
    """The application with the model screen open."""
    async with chat(fake or client(), **options) as c:
        await c.press("f2")
        assert isinstance(c.app.screen, ModelScreen)
        yield c


async def highlight(c: Chat, name: str) -> None:
    """Type a name into the empty filter, and move the focus to the list."""
    assert isinstance(c.app.screen, ModelScreen)
    c.app.screen.browser.clear_filter()
    await c.pilot.press(*name, "down")
    await c.pilot.pause()


async def test_model_screen_judges_models(chat: OpenChat) -> None:
    async with models(chat, size=(120, 40)) as c:
        shown = c.shown()
        assert "Test CPU (cpu), 12.0 GiB free" in shown
        assert "40,960 tokens · fits this machine · estimated 5 tok/s" in shown
        assert "3.8 GiB · fits this machine · estimated 10 tok/s · apache-2.0" in shown
        assert "60.5 GiB · too large for this machine" in shown
        assert "↳ pirate  rank 8 · 1.1 MiB · built-in" in shown
        order = ["On this machine", "Qwen/Qwen3-4B", "Suggested for this machine", "qwen3:1.7b", "qwen3:32b"]
        assert sorted(order, key=shown.index) == order


async def test_download_runs_pauses_resumes_and_is_cancelled(chat: OpenChat) -> None:
    async with models(chat) as c:
        await highlight(c, "qwen3:1.7b")
        await c.press("ctrl+d")
        assert "downloading · 35% of 3.7 GiB" in c.shown()
        assert "goes on if you close this screen" in c.text_of("#notice")
        for key, state in (("ctrl+d", "paused"), ("ctrl+d", "downloading"), ("ctrl+x", "cancelled")):
            await c.press(key)
            assert c.client.jobs["qwen3:1.7b"].state == state
        assert "a download continues it" in c.shown()
        await c.press("ctrl+x")
        assert "Ctrl+U deletes unfinished downloads" in c.text_of("#notice")


async def test_complete_download_becomes_a_model_that_can_be_used(chat: OpenChat) -> None:
    async with models(chat) as c:
        browser = c.app.screen.browser
        await highlight(c, "qwen3:1.7b")
        await c.press("ctrl+d")
        browser.clear_filter()
        c.client.entries = [*c.client.entries, ModelEntry(id="Qwen/Qwen3-1.7B", size=4_100_000_000)]
        c.client.offers = [HUGE, structs.replace(QWEN, installed="Qwen/Qwen3-1.7B")]
        c.client.jobs["qwen3:1.7b"] = Job(name="qwen3:1.7b", state="done", model="Qwen/Qwen3-1.7B")
        browser._poll()
        await c.settle()
        assert "Qwen/Qwen3-1.7B: downloaded" in c.text_of("#notice")
        await c.press("enter")
        assert c.screen.conversation.model == "Qwen/Qwen3-1.7B"


async def test_enter_inspects_a_model_of_the_catalog_before_its_download(chat: OpenChat) -> None:
    fake = client()
    fake.inspections[QWEN.name] = inspection(QWEN.name)
    async with models(chat, fake) as c:
        await c.pilot.press(*"1.7b", "enter")
        await c.until(lambda: "fit on cpu" in c.shown())
        assert not fake.jobs
        await c.press("enter")
        assert list(fake.jobs) == [QWEN.name]


async def test_download_that_ends_at_once_becomes_a_model(chat: OpenChat) -> None:
    fake = client()
    done = Job(name="qwen3:1.7b", state="done", model="Qwen/Qwen3-1.7B")

    async def download(name: str) -> Job:
        fake.jobs[name] = done
        fake.entries = [*fake.entries, ModelEntry(id=done.model, size=4_100_000_000)]
        fake.offers = [HUGE, structs.replace(QWEN, installed=done.model)]
        return done

    async with models(chat, fake) as c:
        browser = c.app.screen.browser
        await highlight(c, "qwen3:1.7b")
        fake.download = download
        await c.press("ctrl+d")
        browser._poll()
        await c.settle()
        assert "Qwen/Qwen3-1.7B: downloaded" in c.text_of("#notice")
        browser.clear_filter()
        await c.pilot.pause()
        assert "Qwen/Qwen3-1.7B" in c.shown()


async def test_slow_update_of_downloads_is_not_repeated(chat: OpenChat) -> None:
    fake = client()
    fake.jobs["org/x"] = Job(name="org/x", state="downloading", total=100, received=1)
    async with models(chat, fake) as c:
        browser = c.app.screen.browser
        gate = asyncio.Event()
        calls = []

        async def downloads() -> list[Job]:
            calls.append(1)
            await gate.wait()
            return [Job(name="org/x", state="downloading", total=100, received=50)]

        fake.downloads = downloads
        for _ in range(3):
            browser._poll()
            await c.pilot.pause(0.01)
        assert len(calls) == 1
        gate.set()
        await c.settle()
        assert "50% of 100 B" in c.shown()


async def test_download_that_fails_says_why(chat: OpenChat) -> None:
    async with models(chat) as c:
        browser = c.app.screen.browser
        await highlight(c, "qwen3:1.7b")
        await c.press("ctrl+d")
        c.client.jobs["qwen3:1.7b"] = Job(name="qwen3:1.7b", state="failed", error="no space", hint="free 2 GiB")
        browser._poll()
        await c.settle()
        assert c.text_of("#notice") == "qwen3:1.7b: no space. free 2 GiB"


async def test_typed_repository_is_inspected_then_downloaded(chat: OpenChat) -> None:
    fake = client()
    fake.inspections["org/new"] = inspection("org/new")
    async with models(chat, fake) as c:
        await c.pilot.press(*"org/new", "enter")
        await c.until(lambda: "fit on cpu" in c.shown())
        await c.press("enter")
        assert list(c.client.jobs) == ["org/new"]
        await c.press("escape", *"org/missing", "ctrl+d")
        assert "is not on the hub. Check the name." in c.text_of("#notice")


async def test_model_is_deleted_after_a_confirmation(chat: OpenChat) -> None:
    async with models(chat) as c:
        await c.press("ctrl+x")
        assert "built in" in c.text_of("#notice")
        await highlight(c, SMALL.id[:12])
        for key, count in (("n", 3), ("y", 2)):
            await c.pilot.press("ctrl+x")
            await c.until(lambda: "Delete HuggingFaceTB/SmolLM2" in c.shown())
            await c.press(key)
            assert len(c.client.entries) == count


async def test_incomplete_model_is_marked_and_its_download_goes_on(chat: OpenChat) -> None:
    fake = client()
    half = ModelEntry(
        id="org/half", size=5, problem="the download is not complete; localllm pull org/half continues it"
    )
    moved = ModelEntry(id="local/m", size=5, problem="imported files have moved; localllm rm local/m, then import it")
    damaged = ModelEntry(id="org/bad", size=5, problem="model.safetensors is damaged")
    fake.entries = [GUIDE, half, moved, damaged]
    async with models(chat, fake, size=(100, 30)) as c:
        assert "cannot be used: the download is not complete · Ctrl+D continues it" in c.shown()
        assert "imported files have moved · Ctrl+X deletes it" in c.shown()
        assert "model.safetensors is damaged · Ctrl+D downloads it again" in c.shown()
        await highlight(c, "org/half")
        assert "Enter details · Ctrl+D download" in c.text_of(".keys")
        await c.press("ctrl+d")
        assert isinstance(c.app.screen, ModelScreen)
        assert list(fake.jobs) == ["org/half"]
        assert "downloading · 35%" in c.shown()


def test_rows_begin_with_running_and_failed_downloads() -> None:
    catalog = Catalog(machine=MACHINE, offers=[HUGE, QWEN, structs.replace(QWEN, name="a:1", suggested=False)])
    jobs = [Job(name="qwen3:32b", state="downloading"), Job(name="org/x", state="failed", error="no space")]
    names = [row.key for row in rows(Lists(catalog=catalog, entries=[GUIDE, LARGE], jobs=jobs))]
    assert names == ["org/x", "qwen3:32b", "guide", LARGE.id, "qwen3:1.7b", "a:1"]


async def test_failed_download_shows_its_reason_and_enter_tries_again(chat: OpenChat) -> None:
    fake = client()
    fake.jobs["qwen3:1.7b"] = Job(
        name="qwen3:1.7b", state="failed", error="no space on the disk", hint="free 2.0 GiB", total=4, received=1
    )
    async with models(chat, fake) as c:
        shown = c.shown()
        assert "failed: no space on the disk" in shown
        assert "free 2.0 GiB · Enter tries again" in shown
        assert shown.index("Downloads") < shown.index("qwen3:1.7b") < shown.index("On this machine")
        await highlight(c, "qwen3:1.7b")
        assert "Enter tries again" in c.text_of(".keys")
        await c.press("enter")
        assert fake.jobs["qwen3:1.7b"].state == "downloading"


async def test_a_line_of_text_from_outside_stays_one_line(chat: OpenChat) -> None:
    fake = client()
    hostile = "org/[red]a[/red]\n\x1b[2Jb\u202e" + "界" * 200
    fake.entries = [GUIDE, ModelEntry(id=hostile, size=5, problem="bad\nheader")]
    async with models(chat, fake) as c:
        lines = c.shown().splitlines()
        assert sum("[red]a[/red] [2Jb⟨U+202E⟩界" in line for line in lines) == 1
        assert any("cannot be used: bad header" in line for line in lines)
        assert all(cell_len(line) == 80 for line in lines)


async def test_list_of_many_models_does_not_scroll_while_a_download_runs(chat: OpenChat) -> None:
    fake = client()
    fake.entries = [GUIDE, *(ModelEntry(id=f"org/model-{index}", size=10**9) for index in range(200))]
    fake.jobs["org/new"] = Job(name="org/new", state="downloading", total=100, received=1)
    async with models(chat, fake) as c:
        browser = c.app.screen.browser
        listed = browser.query_one(ModelList)
        listed.scroll_to(y=50, animate=False)
        await c.pilot.pause()
        fake.jobs["org/new"] = Job(name="org/new", state="downloading", total=100, received=50)
        browser._poll()
        await c.settle()
        assert listed.scroll_y == 50
        await c.pilot.press("down", "home")
        await c.pilot.pause()
        assert "50% of 100 B" in c.shown()


def test_incomplete_model_of_the_catalog_has_one_row() -> None:
    half = ModelEntry(id=QWEN.repository, size=5, problem="the download is not complete")
    lists = Lists(catalog=Catalog(machine=MACHINE, offers=[QWEN]), entries=[half])
    assert [row.key for row in rows(lists)] == [half.id]
    for state, key in (("paused", QWEN.name), ("cancelled", half.id)):
        (row,) = rows(replace(lists, jobs=[Job(name=QWEN.name, state=state)]))
        assert row.key == key
    complete = replace(
        lists,
        entries=[structs.replace(half, problem="")],
        catalog=Catalog(machine=MACHINE, offers=[structs.replace(QWEN, installed=half.id)]),
        jobs=[Job(name=QWEN.name, state="failed")],
    )
    (row,) = rows(complete)
    assert (row.key, row.is_usable) == (half.id, True)


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (Job(name="m"), "asking the hub"),
        (
            Job(name="m", state="downloading", received=50, total=200, speed=2**20, eta=90.0),
            "downloading · 25% of 200 B · 1.0 MiB/s · 2 min left",
        ),
        (Job(name="m", state="failed", error="no space", hint="free some"), "failed: no space"),
    ],
)
def test_progress_of_a_download(job: Job, text: str) -> None:
    assert progress(job) == text


def test_bar_and_duration() -> None:
    assert bar_text(1, 2, width=4) == "██░░"
    assert bar(Job(name="m", state="done", received=2, total=2)) == ""
    assert [duration(seconds) for seconds in (5, 120, 5400)] == ["5 s", "2 min", "1.5 h"]


def test_adapters_are_listed_with_models_of_their_format() -> None:
    copy = structs.replace(GUIDE, id="local/guide-Q8_0", bundled=False, gguf=True)
    lora = structs.replace(PIRATE, id="local/lora", path="/hub/lora.gguf", bundled=False)
    listed = rows(Lists(entries=[GUIDE, copy], folders=[PIRATE, lora]))
    assert [(row.folder.id, row.base) for row in listed if row.folder] == [
        ("pirate", "guide"),
        ("local/lora", "local/guide-Q8_0"),
    ]
